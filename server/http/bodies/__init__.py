"""JSON bodies: reading requests, writing responses and errors. Start with json_body.py."""
