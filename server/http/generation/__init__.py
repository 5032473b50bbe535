"""The routes that generate text, and their streams. Start with completions.py."""
