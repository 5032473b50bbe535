"""Linear layers, split attention and the choice of tokens in C for CPUs, as XLA custom calls.

compiler.py builds them with the machine's own compiler when an engine starts, and library_cache.py keeps what
was built for the next start. Read split_attention.c first.
"""
