"""What each model family is: its shape, and its weights by name. No JAX.

Everything else about a model is derived from here. Start with presets.py; hf_config.py reads a checkpoint's
config.json, tensor_names.py says which of its tensors make up which of our weights.
"""
