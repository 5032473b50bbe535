"""Drafters of speculative decoding: each guesses how an output goes on. No JAX.

drafter.py is the interface, which users may implement; ngram.py and suffix.py need no model; the engine of a
draft model is engine/draft_engine.py. The rows that verify drafts are in iteration/rows/drafted.py.
"""
