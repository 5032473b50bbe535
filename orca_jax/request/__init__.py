"""A client's request: its prompt, sampling parameters and text. No JAX.

May import only errors, config and small_files. Start with sampling_params.py, then request.py.
"""
