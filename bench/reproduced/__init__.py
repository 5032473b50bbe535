"""Figures of other papers, simulated with the real scheduler; without JAX. A module for each paper.

Start with distserve.py. docs/reproduced has a page for each, with what differs from the paper.
"""
