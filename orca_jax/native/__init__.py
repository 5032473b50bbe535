"""Linear layers, attention, linear attention and the choice of tokens in C for CPUs, as XLA custom calls.

compiler.py builds them with the machine's C compiler when an engine starts, and keeps the libraries for the
next start. Read linear.c first, then packed_product.h and split_attention.c.
"""
