"""Flags, `ORCA_*` variables and `--config` keys, made from declared options (orca_jax/options.py)."""
