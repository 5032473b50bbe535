"""Many requests of the engine for one answer, a bounded number of them at a time."""

from collections.abc import Sequence

from orca_jax.errors import InvalidRequest
from server.gateway.gateway import Gateway, LiveRequest, Submission, submitted

_AT_ONCE = 128  # in the engine; the others wait here and take no place of its queue
_MOST_NUMBERS = 1 << 22  # of an answer: about 90 MB of JSON


async def all_ended(
    gateway: Gateway,
    submissions: Sequence[Submission],
    *,
    owner: str,
    running: list[LiveRequest],
    timeout: float | None = None,
) -> list[LiveRequest]:
    """The requests when all have ended; `running` has those that are in the engine now.

    They are cancelled if one fails. Raises QueueFull, NotReady, EngineError, or whatever ended a request
    before it was complete.
    """
    ended: list[LiveRequest] = []
    most = max(1, min(_AT_ONCE, gateway.model().service.pool.max_each))
    for first in range(0, len(submissions), most):
        some = submissions[first : first + most]
        async with submitted(gateway, some, owner=owner, timeout=timeout) as requests:
            running[:] = requests
            for request in requests:
                async for _ in request:
                    pass
            ended += requests
    return ended


def check_inputs(n: int, most: int, param: str) -> None:
    """Raise InvalidRequest for no inputs, or too many."""
    if not 1 <= n <= most:
        advice = f"a request may have 1 to {most} (orca serve --max-inputs)"
        raise InvalidRequest(f"{param} has {n} inputs; {advice}", param=param)


def check_embeddings(n_inputs: int, size: int, param: str) -> None:
    """Raise InvalidRequest if as many embeddings of `size` numbers are too much for one answer."""
    if n_inputs * size > _MOST_NUMBERS:
        message = f"{param} has {n_inputs} inputs, for {size} numbers each; send {_MOST_NUMBERS // size} "
        raise InvalidRequest(message + "at a time, or ask for fewer dimensions", param=param)
