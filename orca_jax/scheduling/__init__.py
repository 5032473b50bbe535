"""Algorithm 1 of ORCA: which requests run in the next iteration, and which slots they hold. No JAX.

Knows requests and the data of an iteration, not the engine that runs it. Start with select.py and
scheduler.py, which follow the paper line by line.
"""
