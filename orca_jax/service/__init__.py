"""The service: the scheduler on its own thread, and handles for users to read their requests' output. No JAX.

`LLM` and the server are built on it. Start with orca.py, then generation.py.
"""
