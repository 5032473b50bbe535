"""The real scheduler on a virtual clock, with faults drawn from a seed. No JAX.

Start with simulation.py; faults.py loses workers, as fault_trace.py says.
"""
