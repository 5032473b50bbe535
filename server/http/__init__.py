"""The HTTP endpoint: OpenAI's API and what an operator needs beside it."""
