"""Submits all requests of one response to the service without blocking the event loop."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import NamedTuple

from orca_jax.service.prepared_params import OutputRules
from server.gateway.gateway import Gateway, LiveRequest
from server.gateway.side_threads import LONG

_SUBMISSION = 1_000  # the fixed cost of one submission, in prompt tokens that take as long to check


class Submission(NamedTuple):
    """One choice: its prompt, its output rules and its request id in the service."""

    prompt_ids: Sequence[int]
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
        n_tokens = 0
        for prompt_ids, rules, request_id in submissions:
            live = gateway.submit(prompt_ids, rules, request_id=request_id, owner=owner, timeout=timeout)
            requests.append(stack.enter_context(live))
            n_tokens += _SUBMISSION + len(prompt_ids)
            if n_tokens > LONG:  # `submit` checks each token of a prompt
                await asyncio.sleep(0)
                n_tokens = 0
        yield requests
