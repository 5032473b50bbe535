"""A load client for any server of OpenAI's protocol: `orca bench`. Start with player.py.

It knows the other side by HTTP alone, and no engine; the traces that it plays serve the benchmarks too.
"""
