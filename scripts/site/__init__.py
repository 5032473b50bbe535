"""The documentation site: pages that are made from the code, and what the build checks. Start with hooks.py."""
