"""The subcommands of `orca`, one file each, and what they print. Start with serve.py."""
