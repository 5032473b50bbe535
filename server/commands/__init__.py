"""The subcommands of `orca`, one file each, and their output. Start with serve.py."""
