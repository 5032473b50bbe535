"""Checkpoints of JAX trainers: names and forms of our weights in MaxText, Tunix and others. No JAX.

Start with array_form.py, then layouts.py, which detects whose checkpoint it is.
"""
