"""Makes the demo model that `orca_jax` ships; `python -m scripts.demo_model --help` says how."""
