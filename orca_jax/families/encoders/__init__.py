"""Encoders alone, which make embeddings: every token sees all others, and nothing is generated. No JAX."""
