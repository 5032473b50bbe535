"""The engine master: it sends each iteration to its workers and waits for the tokens. No JAX.

Workers may be in this process or in processes of their own. Start with engine_master.py.
"""
