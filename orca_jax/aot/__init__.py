"""Compiles programs for devices that need not be present, and asks XLA for their memory plans.

Start with compiled_stage.py.
"""
