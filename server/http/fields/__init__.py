"""OpenAI's requests and responses as pydantic models. Start with chat.py."""
