"""Routes a request to the engine that has the beginning of its prompt cached, unless that engine is too busy.

prefix_key.py turns a request into hashes, prefix_choice.py chooses an engine by them, and prefix_router.py
connects both to Ray.
"""
