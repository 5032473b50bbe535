"""The engine master: sends each iteration to its workers and waits for the tokens. No JAX.

Workers run in this process or in their own processes. Start with engine_master.py.
"""
