"""Adapters that make the engine the rollout of a reinforcement-learning trainer: tunix.py for Tunix.

A file with a trainer's name imports its library, and no other file does, so the package works without it.
"""
