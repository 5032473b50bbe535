"""File descriptors for as many connections as are allowed: a process often starts with room for 1,024."""

import logging
import resource
from dataclasses import replace

from server.settings.config import EndpointOptions

_LOGGER = logging.getLogger("orca.limits")

_OTHERS = 512  # files, workers, the model's weights, connections that are refused


def with_room(options: EndpointOptions) -> EndpointOptions:
    """Raise the process's limit as far as needed and allowed; if that is not enough, allow fewer connections
    and log that.
    """
    n_endpoints = 1 if options.grpc_port is None else 2
    needed = n_endpoints * options.max_connections + _OTHERS
    there = _raised(needed)
    if there >= needed:
        return options
    most = max((there - _OTHERS) // n_endpoints, 1)
    _LOGGER.warning(
        "max_connections is %d, not %d: the process may have %d files open (ulimit -n), and %d are needed",
        *(most, options.max_connections, there, needed),
    )
    return replace(options, max_connections=most)


def _raised(needed: int) -> int:
    """How many descriptors there may be, after asking for so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):
        return soft
    return allowed
