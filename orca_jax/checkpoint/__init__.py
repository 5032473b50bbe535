"""Reads and writes weights: safetensors, Orbax, and conversion between them.

Only each device's own part is read. Start with directory.py.
"""
