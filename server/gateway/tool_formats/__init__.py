"""The formats in which models write tool calls, a file for each; table.py lists them all."""
