"""K/V events: publishes over ZeroMQ which blocks the prefix cache has, for routers, as vLLM does.

It needs the extra `kv-events`, so server/commands/router_view.py imports it on demand. Start with
publisher.py.
"""
