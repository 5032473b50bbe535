"""The engine as the rollout of a trainer: tunix.py is Tunix's.

Each file of a trainer's name imports its library, and nothing else does: the package works without it.
"""
