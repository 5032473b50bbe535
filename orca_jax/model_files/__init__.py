"""A model's files without its weights. No JAX, so that a mistake in them is reported at once.

Start with found_model.py: a model by its name. locate.py finds the directory, other_kinds.py says what a path
holds that is no checkpoint, description.py reads the JSON that describes the model, and weight_files.py lists
the safetensors files, which orca_jax/checkpoint reads.
"""
