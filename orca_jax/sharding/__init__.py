"""Splits a model over devices, and links stages. Start with partition.py."""
