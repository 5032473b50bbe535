"""The real scheduler on a virtual clock. No JAX.

Start with simulation.py.
"""
