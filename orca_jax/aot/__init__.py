"""Compiles programs for devices that need not be present, and reads XLA's memory plans.

Start with compiled_stage.py.
"""
