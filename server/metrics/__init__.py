"""`/metrics` for Prometheus, and the access log. Start with metrics.py."""
