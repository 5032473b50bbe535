"""The application for Ray Serve, measured; needs the extra `ray`, and openai for conversations.py.

conversations.py has how much of the prompts engines find in their caches, overhead.py what Ray Serve costs.
"""
