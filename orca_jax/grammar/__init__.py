"""Structured output: which tokens may come next under a grammar. No JAX.

May import `request`. source.py turns a request's fields into grammar text, grammar.py compiles it,
constraint.py follows it token by token. Start with constraint.py.
"""
