"""Fields of OpenAI's requests and responses as pydantic models. Start with generation.py."""
