"""The documentation site: pages made from the code, and checks. Start with hooks.py."""
