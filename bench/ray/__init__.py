"""Benchmarks of the Ray Serve application; needs the extra `ray`, and openai for conversations.py.

conversations.py measures the share of prompts found in caches, overhead.py the cost of Ray Serve.
"""
