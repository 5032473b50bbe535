"""Makes the demo model that `orca_jax` ships; see `python -m scripts.demo_model --help`."""
