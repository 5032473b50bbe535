"""Structured output: computes the tokens that may come next under a grammar. No JAX.

May import `request`. source.py turns a request's fields into grammar text, json_schema.py rewrites JSON
schemas for llguidance, grammar.py compiles the text, constraint.py follows it token by token. Start with
constraint.py.
"""
