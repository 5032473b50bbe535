"""The requests of one response, handed to the service together without holding the event loop."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import NamedTuple

from orca_jax.service.prepared_params import OutputRules
from server.gateway.gateway import Gateway, LiveRequest
from server.gateway.side_threads import LONG

_SUBMISSION = 1_000  # tokens whose check takes as long as all else about one


class Submission(NamedTuple):
    """One choice: its prompt, its rules, and its name in the service."""

    prompt_ids: Sequence[int]
    rules: OutputRules
    request_id: str


@asynccontextmanager
async def submitted(
    gateway: Gateway, submissions: Iterable[Submission], *, owner: str, timeout: float | None = None
) -> AsyncIterator[list[LiveRequest]]:
    """The live requests, all of them accepted or none; they end when this is left.

    Raises as `Gateway.submit` does.
    """
    with ExitStack() as ending:
        requests = list[LiveRequest]()
        n_tokens = 0
        for prompt_ids, rules, request_id in submissions:
            live = gateway.submit(prompt_ids, rules, request_id=request_id, owner=owner, timeout=timeout)
            requests.append(ending.enter_context(live))
            n_tokens += _SUBMISSION + len(prompt_ids)
            if n_tokens > LONG:  # each token of a prompt is looked at
                await asyncio.sleep(0)
                n_tokens = 0
        yield requests
