"""A worker's controller, and the supervisor that starts worker processes. No JAX.

A controller takes control messages and issues work; what a device is, it need not know. Start with
controller.py.
"""
