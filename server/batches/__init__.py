"""Offline work over HTTP: clients' files, and batches whose lines run as requests of the lowest order.

All is kept in one folder (`--batch-dir`), and goes on there after a restart. Start with runner.py. Knows no
endpoint: a line is answered by a function that it is given.
"""
