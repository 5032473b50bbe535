"""Composition roots: builds an engine of its parts, loads and changes its weights, and starts processes.

A file here knows rooms with and without JAX, and runs before or between iterations; what runs in an iteration
is in execution/. start_engine.py starts an engine wherever its stages run; worker_process.py runs one stage.
Only `llm.py`, the command line and benchmarks import this package.
"""
