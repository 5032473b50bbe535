"""Split attention through cuDNN's paged attention, for GPUs without a kernel in pallas/.

This folder knows no model or mesh. Start with split_attention.py, which divides keys between cuDNN and XLA.
"""
