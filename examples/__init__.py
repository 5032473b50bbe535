"""Programs to read and to run from a checkout: `python -m examples.NAME`."""
