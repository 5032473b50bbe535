"""OpenAI's Responses API. Start with responses.py; store.py keeps earlier responses."""
