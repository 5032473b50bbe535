"""Drafters of speculative decoding: each guesses how an output goes on. No JAX.

drafter.py is the interface, which users may implement; ngram.py and suffix.py need no model. The rows
that verify drafts are in iteration/rows/drafted.py.
"""
