"""The routes that generate text, with their requests, responses and streams. Start with completions.py."""
