"""How trainers in JAX save our weights: the names and forms of MaxText, Tunix and Gemma's own code. No JAX.

Start with array_form.py, then layouts.py, which detects whose checkpoint it is.
"""
