"""Checkpoints of JAX trainers: names and forms of our weights in MaxText, Tunix and Gemma's library. No JAX.

Start with array_form.py, then layouts.py, which detects whose checkpoint it is.
"""
