"""OpenAI's /v1/files and /v1/batches over server/batches. Start with batches.py."""
