"""Parses a chat model's output into reasoning, text and tool calls. Start with events.py."""
