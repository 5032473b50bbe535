"""`python -m bench.hostile`: what hostile clients cost the well-behaved ones beside them.

Read `__main__.py` first; the attacks are in `bodies.py`, `generations.py`, `connections.py` and `rpc.py`.
"""
