"""Which engine a request goes to: the one that has its prompt's beginning cached, unless it is too busy.

prefix_key.py turns a request into hashes, prefix_choice.py decides, and prefix_router.py is Ray's side.
"""
