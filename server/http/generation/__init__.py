"""The OpenAI routes that generate text, and what all generating routes share. Start with completions.py."""
