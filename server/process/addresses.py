"""Addresses: those to listen on, where a mistake is told as the system tells it, and those of clients."""

import ipaddress
import socket

from orca_jax.errors import ConfigError


def bound_socket(host: str, port: int, *, flag: str) -> socket.socket:
    """A TCP socket bound to the address, not listening yet; `flag` is what sets the port.

    Raises ConfigError where the address is taken, not this machine's, or none.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With its protocol, without which asyncio would not send small messages at once.
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
    """The host as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def network_of(host: str) -> str:
    """Whom a client's address belongs to: an IPv6 host has a whole /64 to choose its addresses from."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:  # no address of a network, such as a socket's path
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return format(int(address) >> 64, "x") + "::/64"


def owner_at(host: str) -> str:
    """The owner of requests that come from this address without an API key."""
    return f"address {network_of(host)}"
