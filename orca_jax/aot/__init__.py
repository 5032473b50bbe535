"""Programs compiled for devices that need not be here, and what XLA plans for their memory.

Start with compiled_stage.py.
"""
