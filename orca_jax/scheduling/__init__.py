"""Algorithm 1 of ORCA: which requests run in the next iteration, and who holds which slots. No JAX.

Knows requests and one iteration's data, not the engine that runs it. Start with select.py and
scheduler.py, beside the paper.
"""
