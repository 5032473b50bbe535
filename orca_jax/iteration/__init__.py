"""One iteration as data: the control message, and the flat batch that is padded to a bucket. No JAX.

Pure functions on NumPy arrays. Start with shape.py and message.py, then flat_batch.py.
"""
