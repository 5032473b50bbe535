"""HTTP connections, bounded before the application sees anything. Start with listener.py."""
