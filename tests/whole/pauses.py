"""Pauses of an engine at a known place in an output."""

import threading
from collections.abc import Sequence

from orca_jax import LLM
from orca_jax.scheduling.request_pool import Delivery


def pause_after(llm: LLM, n_tokens: int) -> threading.Event:
    """Pause before the next iteration once an output has this many tokens; return an event for that."""
    paused = threading.Event()

    def look(deliveries: Sequence[Delivery]) -> None:
        if any(len(request.output_ids) == n_tokens for request, _, _ in deliveries):
            llm.service.interludes.paused = llm.service.interludes.active = True
            llm.service.on_delivered = None
            paused.set()

    llm.service.on_delivered = look
    return paused
