"""Generators of files that the repository contains: the demo model, the golden files."""
