"""Run from a checkout: `python -m bench.NAME` shows progress, prints a table, and last one line of JSON."""
