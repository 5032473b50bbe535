"""A worker's controller, and the supervisor that starts worker processes. No JAX.

A controller takes control messages and issues work to a device behind a protocol. Start with controller.py.
"""
