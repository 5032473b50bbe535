"""OpenTelemetry traces: a span for each request, joined to its caller's trace. Start with tracing.py.

spans.py and otlp.py need the extra `otel`; the other files do not.
"""
