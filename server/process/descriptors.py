"""Raises the limit on open files to fit the allowed connections: the default is often only 1,024."""

import logging
import resource
from dataclasses import replace

from server.settings.endpoint_options import EndpointOptions

_LOGGER = logging.getLogger("orca.limits")

_OTHERS = 512  # for files, workers, the model's weights and refused connections


def with_room(options: EndpointOptions) -> EndpointOptions:
    """Raise the process's limit on open files as far as needed and allowed.

    If that is not enough, return options with a lower `max_connections` and log a warning.
    """
    n_endpoints = 1 if options.grpc_port is None else 2
    needed = n_endpoints * options.max_connections + _OTHERS
    limit = _raised(needed)
    if limit >= needed:
        return options
    most = max((limit - _OTHERS) // n_endpoints, 1)
    _LOGGER.warning(
        "max_connections is %d, not %d: the process may have %d files open (ulimit -n), and %d are needed",
        *(most, options.max_connections, limit, needed),
    )
    return replace(options, max_connections=most)


def _raised(needed: int) -> int:
    """Raise the soft limit towards `needed`; return the limit that now applies, at most `needed`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):
        return soft
    return allowed
