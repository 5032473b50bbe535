"""Request bodies in, responses and errors out, as JSON. Start with json_body.py."""
