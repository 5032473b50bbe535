"""What a chat model's output means: its reasoning, its text and its tool calls. Start with events.py."""
