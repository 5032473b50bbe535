"""Composition roots: where the rooms without JAX and those with it are put together.

start_engine.py makes an engine wherever its stages run, worker_process.py one stage. Nothing but `llm.py`,
the command line and benchmarks imports these.
"""
