"""Models with an encoder and a decoder: T5's and BART's families. No JAX.

As in decoders/, a file says how a config.json becomes a ModelConfig and back, and what a checkpoint calls
each weight. Read t5.py first.
"""
