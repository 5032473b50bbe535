"""Offline work: clients' files, and batches, whose lines run as requests of the lowest priority.

Everything is kept in one folder (`--batch-dir`), and batches continue after a restart. Start with runner.py.
The room knows no endpoint: a function that its user passes in answers a line.
"""
