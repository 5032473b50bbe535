"""Makes the tracing that a server's settings ask for; imports OpenTelemetry only then."""

from collections.abc import Mapping
from importlib.util import find_spec

from orca_jax.errors import ConfigError
from orca_jax.extras import install_line
from server.tracing.tracing import Tracing

_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def tracing_to(endpoint: str | None, environ: Mapping[str, str]) -> Tracing | None:
    """Tracing to a collector's address; None without one.

    Raises ConfigError if the libraries are missing or a variable is of no use.
    """
    if endpoint is None:
        return None
    if not (_is_installed("opentelemetry.sdk") and _is_installed("opentelemetry.exporter.otlp.proto.http")):
        raise ConfigError(
            f"otlp_traces_endpoint needs OpenTelemetry: {install_line('otel')} (or leave it out)"
        )
    # Imported on demand: the libraries are an extra, which a server without traces does not need.
    from server.tracing.otlp import otlp_writer

    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "http/protobuf")
    return Tracing(otlp_writer(endpoint, protocol.strip().lower()))


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False
