"""The interface between scheduler and engine: iterations go in, tokens come back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from orca_jax.iteration.rows.pooled import add_pooled
from orca_jax.iteration.rows.scored import add_prompt_logprobs
from orca_jax.request.pooled_vector import Vector
from orca_jax.request.request import Row, RowAnswer
from orca_jax.request.routed_experts import ExpertIds
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.scheduling.timeline import IterationRecord

_NOTHING: Mapping[int, Any] = MappingProxyType({})
_NO_ROWS: frozenset[int] = frozenset()


def never() -> bool:
    """Pass this as `interrupted` to a wait that must not end early, because no other batch can be issued."""
    return False


@dataclass(slots=True, eq=False)
class Iteration:
    """An iteration in flight: `Engine.issue` returns it, and `Engine.wait` takes it.

    `pending` belongs to the engine. The scheduler adds the timeline's `record` and `partial`, the indices of
    rows that sample no token: prompt chunks that do not reach the end of the prompt.
    """

    rows: Sequence[Row]
    pending: Any = None
    record: IterationRecord | None = None
    partial: frozenset[int] = _NO_ROWS


class Returned(NamedTuple):
    """The results of an iteration, by the request's place in its batch.

    `token_ids` has an entry for every request, which is meaningless where the row sampled no token. `answers`
    has what came back for other kinds of rows than the plain one, and for requests with log-probabilities.
    The last three are about input tokens: log-probabilities of a prompt's tokens after the first, sums of
    hidden states, and the experts of all input tokens with the position of the first. For a chunked prompt
    they come chunk by chunk.
    """

    token_ids: list[int]
    answers: Mapping[int, RowAnswer] = _NOTHING
    prompt_logprobs: Mapping[int, list[TokenLogprobs]] = _NOTHING
    pooled: Mapping[int, Vector] = _NOTHING
    routed: Mapping[int, tuple[int, ExpertIds]] = _NOTHING

    def give_prompts(self, rows: Sequence[Row]) -> None:
        """Add the results about input tokens to the requests of these rows."""
        for i, records in self.prompt_logprobs.items():
            add_prompt_logprobs(rows[i][0], records)
        for i, vector in self.pooled.items():
            add_pooled(rows[i][0], vector)
        for i, (start, ids) in self.routed.items():
            rows[i][0].add_routed(start, ids)


class Engine(Protocol):
    """Runs iterations, at most `n_workers` + 1 in flight; the scheduler waits for them in the order of issue.

    Both methods raise EngineError. All iterations in flight are then lost.
    """

    @property
    def n_workers(self) -> int:
        """The number of inter-layer partitions: as many batches in flight keep all of them busy."""
        ...

    @property
    def keeps_tokens(self) -> bool:
        """Whether sampled tokens stay on the device, so a request can be issued before its token returns."""
        ...

    def issue(self, rows: Sequence[Row]) -> Iteration:
        """Start one iteration of the model, without waiting for a device.

        The requests have their rows and blocks; their state changes after this call. A request whose last
        token has not returned continues with the token on the device.
        """
        ...

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        """Wait for the oldest iteration in flight; None if `interrupted` returned True before it was done.

        If `interrupted` is `never`, the engine need not call it.
        """
        ...
