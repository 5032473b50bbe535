"""Decoders whose feed-forward layers are mixtures of experts (Shazeer et al., 2017; ORCA has none). No JAX.

experts_config.py is the part of a ModelConfig that says how tokens are routed; expert_names.py has how
checkpoints store experts. The other files are a family each, or a few close ones, as in `decoders/`.
"""
