"""One iteration as data: the control message, and the flat batch that is padded to a bucket. No JAX.

Arrays go in and out; nothing here decides or waits. Start with shape.py and message.py, then flat_batch.py.
"""
