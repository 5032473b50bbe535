"""Split attention by cuDNN's paged attention, for GPUs without a kernel of ours. It knows no model and no
mesh.

Start with split_attention.py, which divides the keys between cuDNN and XLA.
"""
