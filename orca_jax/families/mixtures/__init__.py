"""Decoders whose feed-forward layers are mixtures of experts (Shazeer et al., 2017; ORCA has none). No JAX.

experts_config.py is the part of a ModelConfig that says how tokens are routed, and experts_in_files.py has
the fields and tensors of experts that families share. The other files are a family or a few close ones each.
"""
