"""Flags, `ORCA_*` variables and `--config` keys, all made from one list: options.py."""
