"""`python -m bench.hostile`: the effect of hostile clients on well-behaved ones.

Read `__main__.py` first; the attacks are in `bodies.py`, `generations.py`, `connections.py` and `rpc.py`.
"""
