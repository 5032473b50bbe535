"""Scheduling policies compared on the same engine and traces, simulated or real (docs/scheduling.md)."""
