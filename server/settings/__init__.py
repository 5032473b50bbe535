"""What can be set: flags, `ORCA_*` variables and `--config` files, all from one list. See config.py."""
