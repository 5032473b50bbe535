"""A model's files without its weights. No JAX, so that a mistake in them is reported at once.

Start with found_model.py, which finds a model by its name. locate.py finds the directory, other_kinds.py says
what a path holds that is no checkpoint, and weight_files.py lists the safetensors files, which
orca_jax/checkpoint reads.
"""
