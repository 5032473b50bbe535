"""The files of the pages (static/), which server/http/pages.py sends, and the feed of the live view.

Start with feed.py; docs/pages.md describes the pages.
"""
