"""K/V events: tells routers over ZeroMQ which blocks the prefix cache has, as vLLM does.

Needs the extra kv-events (server/commands/router_view.py imports it on demand). Read publisher.py first.
"""
