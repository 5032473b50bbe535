"""What this engine tells a comparison, with `LLM` and without: its tokens as they come, and its versions."""

import platform
from collections.abc import Sequence

import jax

import orca_jax
from bench.peers.child import Playing
from orca_jax.scheduling.request_pool import Delivery


def delivered(playing: Playing, deliveries: Sequence[Delivery]) -> None:
    """Pass deliveries on; requests have their numbers as ids."""
    for request, _, reason in deliveries:
        if reason is not None:
            playing.done(int(request.request_id), request.output_ids)
        elif playing.streams:
            playing.first(int(request.request_id))


def versions() -> str:
    """What ran: this package, JAX and Python."""
    return f"orca_jax {orca_jax.__version__}, jax {jax.__version__}, Python {platform.python_version()}"
