"""Shapes by name, without weights, which `--load-format dummy` draws at random. No JAX.

The demo model, GPT-2, the models of the paper's Table 1, and published base models. by_name.py has them all.
"""
