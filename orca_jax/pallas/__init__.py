"""Kernels for GPUs, each with a pure-JAX reference of the same signature. They know no model or mesh.

Start with split_attention.py.
"""
