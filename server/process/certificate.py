"""Checks the certificate of a server's endpoints before anything waits for it."""

import ssl

from orca_jax.errors import ConfigError
from server.settings.endpoint_options import EndpointOptions


def check_certificate(options: EndpointOptions) -> None:
    """Raise ConfigError unless certificate and key are usable, or there are none."""
    if options.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        files = f"{options.ssl_certfile} and {options.ssl_keyfile}"
        raise ConfigError(f"{files} are not a usable certificate and key: {error}") from error
