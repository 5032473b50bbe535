"""The wire between the engine master and worker processes: frames over gRPC. No JAX.

Every message has one file that encodes and checks it. Start with frame.py, then message_wire.py.
"""
