"""Cost and memory of a model by arithmetic, and the sizes of an engine that follow. No JAX.

One arithmetic for `orca plan`, for the engine and for the simulation. Start with plan.py.
"""
