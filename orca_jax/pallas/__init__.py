"""Kernels for GPUs, each with a pure-JAX reference of the same signature. They know no model and no mesh."""
