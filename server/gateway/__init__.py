"""Connects the HTTP and gRPC endpoints to the engine, on the event loop. Start with gateway.py."""
