"""Engines to compare with, each a program for the Python of its own environment (bench/compare.py)."""
