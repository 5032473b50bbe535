"""K/V events: tells routers over ZeroMQ which blocks the prefix cache has, as vLLM does.

Needs the extra kv-events. start.py alone is imported without it; read publisher.py first.
"""
