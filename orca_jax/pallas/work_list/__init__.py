"""The attention kernel's list of work: which core computes what. NumPy only.

Start with work_items.py; balance.py shares the work out, bounds.py has the sizes of the list.
"""
