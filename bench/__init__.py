"""Run from a checkout: `python -m bench.NAME` shows progress, prints a table, and as its last line JSON."""
