"""Reading and writing weights: safetensors, Orbax, and conversion between them.

Each device's own part is read and no more. Start with load.py.
"""
