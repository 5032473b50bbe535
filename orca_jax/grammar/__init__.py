"""Structured output: which tokens may come next under a grammar. No JAX.

Knows requests. source.py turns a request's fields into a grammar's text, grammar.py compiles it,
constraint.py follows it token by token. Start with constraint.py.
"""
