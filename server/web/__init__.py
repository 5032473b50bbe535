"""The pages for people, and the feed of the live view. Start with pages.py and feed.py."""
