"""The kernels' lists of work: which core computes what.

Attention's is NumPy, made on the host: start with work_items.py; balance.py shares the work out, bounds.py
has the sizes. The experts' is made on the device, where their rows are known (group_tiles.py).
"""
