"""Example programs, run from a checkout: `python -m examples.NAME`."""
