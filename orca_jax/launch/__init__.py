"""Composition roots: where the rooms without JAX and those with it are put together.

local_engine.py makes an engine in this process, worker_process.py one stage of one. Nothing but `llm.py`, the
command line and benchmarks imports these.
"""
