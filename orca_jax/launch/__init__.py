"""Composition roots, which combine the packages with and without JAX.

start_engine.py starts an engine wherever its stages run; worker_process.py runs one stage. Only `llm.py`, the
command line and benchmarks import this package.
"""
