"""HTTP connections, and the limits that apply before the application runs. Start with listener.py."""
