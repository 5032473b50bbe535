"""Reports of this engine to a comparison, with `LLM` and without: tokens as they come, and versions."""

import platform
from collections.abc import Sequence

import jax

import orca_jax
from bench.peers.child import Playing
from orca_jax.scheduling.request_pool import Delivery


def delivered(playing: Playing, deliveries: Sequence[Delivery]) -> None:
    """Pass deliveries on; requests' ids are their numbers."""
    for request, _, reason in deliveries:
        if reason is not None:
            playing.done(int(request.request_id), request.output_ids)
        elif playing.streams:
            playing.first(int(request.request_id))


def versions() -> str:
    """Versions of this package, JAX and Python."""
    return f"orca_jax {orca_jax.__version__}, jax {jax.__version__}, Python {platform.python_version()}"
