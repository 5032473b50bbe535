"""The HTTP endpoint: OpenAI's API, and routes for operators such as /health and /metrics."""
