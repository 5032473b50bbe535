"""The kernels' work lists: which core computes what.

The host makes attention's list in NumPy: start with work_items.py; balance.py distributes the work, bounds.py
has the sizes. The experts' list is made on the device, where the groups' sizes are (group_tiles.py).
"""
