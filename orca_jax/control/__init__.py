"""The wire between the engine master and worker processes: frames over gRPC. No JAX.

worker.proto defines every message; one file each encodes and checks them. Start with it, then frame.py.
"""
