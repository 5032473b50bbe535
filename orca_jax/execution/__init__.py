"""A stage's work on its devices (ORCA 4.1): the compiled programs, and the worker that feeds them.

Kernels are chosen here (attention_backend.py, matmul_backend.py, sampling.py); launch/ builds engines of
workers. Start with worker.py, then stage_programs.py, which has a function for each program.
"""
