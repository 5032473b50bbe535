"""Speculative decoding that changes no token: drafters guess how an output goes on, iterations verify it.

drafter.py is the interface, which users may implement; ngram.py is the drafter that needs no model. The rows
that verify drafts are in iteration/rows/drafted.py. No JAX.
"""
