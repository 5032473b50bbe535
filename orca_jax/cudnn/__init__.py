"""Split attention through cuDNN's paged attention, for GPUs that have no kernel of our own.

It knows no model and no mesh. Start with split_attention.py, which divides the keys between cuDNN and XLA.
"""
