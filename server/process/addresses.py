"""Addresses to listen on, the certificate for them, and the addresses of clients."""

import ipaddress
import socket
import ssl
from urllib.parse import urlsplit

from orca_jax.errors import ConfigError
from server.errors import UsageError
from server.settings.endpoint_options import EndpointOptions


def bound_socket(host: str, port: int, *, flag: str) -> socket.socket:
    """A TCP socket bound to the address but not listening yet. `flag` is the option that sets the port.

    Raises ConfigError, with the system's reason, if the address is in use, invalid or not on this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio sets TCP_NODELAY, which sends small messages at once, only if the protocol is given.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        message = f"cannot listen on {host} port {port}: {error.strerror}; choose another {flag} or --host"
        raise ConfigError(message) from error
    return bound


def in_url(host: str) -> str:
    """The host as written in a URL, with brackets around an IPv6 address."""
    return f"[{host}]" if ":" in host else host


def server_url(url: str, *, flag: str) -> str:
    """A server's address, without a "/v1" at its end. Raises UsageError, which names the `flag`."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        parts, is_address = urlsplit(""), False
    if not is_address or parts.query or parts.fragment:
        raise UsageError(
            f"{flag} is {url!r}; it must begin with http:// or https:// and have a host, and perhaps a port, "
            "as in http://host:8000"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def network_of(host: str) -> str:
    """The client's network: an IPv4 address itself, or the /64 of an IPv6 address.

    One IPv6 host can choose its addresses from a whole /64, so limits apply to the /64.
    """
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:  # not an IP address, for example the path of a Unix socket
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return format(int(address) >> 64, "x") + "::/64"


def owner_at(host: str) -> str:
    """The owner of requests from this address that carry no API key."""
    return f"address {network_of(host)}"


def check_certificate(options: EndpointOptions) -> None:
    """Raise ConfigError unless certificate and key are usable, or there are none."""
    if options.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        files = f"{options.ssl_certfile} and {options.ssl_keyfile}"
        raise ConfigError(f"{files} are not a usable certificate and key: {error}") from error
