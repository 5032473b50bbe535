"""Offline work: clients' files, and batches, whose lines run as requests of the lowest priority.

Everything is kept in one folder (`--batch-dir`), and batches continue after a restart. Start with runner.py.
The package knows no endpoint: its user passes in a function that answers a line.
"""
