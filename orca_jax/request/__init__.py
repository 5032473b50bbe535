"""What a client may ask for: a request, its sampling parameters, its text. No JAX.

May import only errors, config and small_files. Start with sampling_params.py, then request.py.
"""
