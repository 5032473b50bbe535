"""Endpoint processes: `orca serve --endpoint-processes N` reads requests and writes answers in N processes.

The engine's process keeps the scheduler, the pages, and all routes that do not generate. Read engine_side.py
and remote_service.py first: the two ends of a line (line.py) that carries requests and, once an iteration,
the tokens of all of them.
"""
