"""The scheduler on a thread of its own, and a request as its user holds it. No JAX.

What `LLM` and the server stand on. Start with orca.py, then generation.py.
"""
