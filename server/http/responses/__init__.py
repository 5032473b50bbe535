"""OpenAI's Responses API. Start with routes.py; the store of earlier responses is store.py."""
