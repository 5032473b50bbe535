"""Decoders without experts, a file for each family or for a few close ones.

A file says how a config.json becomes a ModelConfig and back, and what a checkpoint calls each weight. No JAX,
and no mathematics, which is in model/. Read llama.py first; llama_like.py has what its relatives share, and
rope_fields.py reads rotary positions in every spelling.
"""
