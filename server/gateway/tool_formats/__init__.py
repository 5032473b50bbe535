"""How models write tool calls: a file for each format, and the table of all in table.py."""
