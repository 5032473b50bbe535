"""Anthropic's Messages API. Start with messages.py."""
