"""Submits all requests of one response to the service without blocking the event loop."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack, asynccontextmanager
from typing import NamedTuple

from orca_jax.scheduling.admission import CheckedPrompt
from orca_jax.service.prepared_params import OutputRules
from server.gateway.gateway import Gateway, LiveRequest

_AT_ONCE = 8  # submissions before the event loop may run something else


class Submission(NamedTuple):
    """One choice: its prompt, its output rules and its request id in the service."""

    prompt: CheckedPrompt
    rules: OutputRules
    request_id: str


@asynccontextmanager
async def submitted(
    gateway: Gateway, submissions: Iterable[Submission], *, owner: str, timeout: float | None = None
) -> AsyncIterator[list[LiveRequest]]:
    """The live requests: either all are accepted or none. They end when the context exits.

    Raises what `Gateway.submit` raises.
    """
    with ExitStack() as stack:
        requests = list[LiveRequest]()
        for i, (prompt, rules, request_id) in enumerate(submissions):
            if i and i % _AT_ONCE == 0:
                await asyncio.sleep(0)
            live = gateway.submit(prompt, rules, request_id=request_id, owner=owner, timeout=timeout)
            requests.append(stack.enter_context(live))
        yield requests
