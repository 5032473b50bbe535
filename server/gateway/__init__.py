"""Between the endpoints and the engine: requests in, pieces out, on the event loop. Start with gateway.py."""
