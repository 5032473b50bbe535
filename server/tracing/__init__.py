"""OpenTelemetry traces: a span for each client's request, joined to the caller's trace. Start with tracing.py.

spans.py and exporter.py need the extra otel; the other files are imported without it.
"""
