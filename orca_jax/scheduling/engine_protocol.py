"""What a scheduler needs of an engine: iterations go in, tokens come back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from orca_jax.iteration.row import Row
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.scheduling.timeline import IterationRecord

NOTHING: Mapping[int, Any] = MappingProxyType({})
NO_PIECES: frozenset[int] = frozenset()


def never() -> bool:
    """What interrupts a wait when nothing else could be issued meanwhile."""
    return False


@dataclass(slots=True, eq=False)
class Iteration:
    """An iteration that was issued: `Engine.issue` returns it, and `Engine.wait` takes it.

    `pending` is the engine's own: what it waits for. The scheduler adds the timeline's `record`, and
    `pieces`: the places of rows that sample no token.
    """

    rows: Sequence[Row]
    pending: Any = None
    record: IterationRecord | None = None
    pieces: frozenset[int] = NO_PIECES


class Returned(NamedTuple):
    """What a finished iteration computed, by its rows: `token_ids` is `[len(rows)]`.

    The token of a row that sampled none means nothing. Log-probabilities are by place in the batch, where a
    request asked for them; those of a prompt that comes in pieces come in pieces.
    """

    token_ids: list[int]
    logprobs: Mapping[int, TokenLogprobs] = NOTHING
    prompt_logprobs: Mapping[int, list[TokenLogprobs]] = NOTHING


class Engine(Protocol):
    """Runs iterations, in flight up to one more than `n_workers`; they are waited for in the order of issue.

    Both methods raise EngineError; nothing is in flight any more then.
    """

    @property
    def n_workers(self) -> int:
        """Inter-layer partitions: how many batches keep all of them busy."""
        ...

    @property
    def keeps_tokens(self) -> bool:
        """Whether a request may be issued again before its token has come back: the device has it."""
        ...

    def issue(self, rows: Sequence[Row]) -> Iteration:
        """Start one iteration of the model, without waiting for a device.

        The requests are still as they were before it, and their rows and blocks are reserved. One with a
        token on the way continues with the token that the device has.
        """
        ...

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        """Wait for the oldest iteration in flight; None if `interrupted` turned true before it was done.

        An `interrupted` that is `never` need not be called.
        """
        ...
