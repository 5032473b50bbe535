"""Model families: the shape of each, and its weights by name. No JAX.

Everything else about a model is derived from here. Start with decoders/llama.py, the table of a family.
model_config.py has the parts of a model, and parameters.py the weights that they need. registry.py lists the
families, and hf_config.py reads a checkpoint's config.json.
"""
