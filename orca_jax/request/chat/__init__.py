"""Conversations: a checkpoint's chat template turns messages and tools into a prompt's text. No JAX.

May import only errors, small_files and request. Start with conversation.py, then chat_template.py.
"""
