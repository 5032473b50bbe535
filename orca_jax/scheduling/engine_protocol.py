"""The interface between scheduler and engine: iterations go in, tokens come back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from orca_jax.iteration.row import Row
from orca_jax.request.pooled_vector import Vector
from orca_jax.request.routed_experts import ExpertIds
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.scheduling.timeline import IterationRecord

_NO_LOGPROBS: Mapping[int, Any] = MappingProxyType({})
_NO_ROWS: frozenset[int] = frozenset()


def never() -> bool:
    """The `interrupted` of a wait that cannot be interrupted, because no other batch could be issued."""
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
    """The results of an iteration: `token_ids` has one token per row.

    If a row sampled no token, ignore its entry. Log-probabilities are keyed by row index, for the requests
    that asked for them. Those of a chunked prompt arrive chunk by chunk. `given` has all tokens that a row
    computed of a given output, `beams` the likeliest next tokens of each beam of a search. `pooled` has sums
    of hidden states, for requests that pool those of their prompt; of a chunked one also chunk by chunk.
    `routed` has the experts of all tokens that a row computed, and the place of the first of these tokens.
    """

    token_ids: list[int]
    logprobs: Mapping[int, TokenLogprobs] = _NO_LOGPROBS
    prompt_logprobs: Mapping[int, list[TokenLogprobs]] = _NO_LOGPROBS
    given: Mapping[int, list[TokenLogprobs]] = _NO_LOGPROBS
    beams: Mapping[int, list[TokenLogprobs]] = _NO_LOGPROBS
    pooled: Mapping[int, Vector] = _NO_LOGPROBS
    routed: Mapping[int, tuple[int, ExpertIds]] = _NO_LOGPROBS

    @property
    def has_only_tokens(self) -> bool:
        """Whether no row has anything but a token, or that of a prompt."""
        return not (self.logprobs or self.given or self.beams)

    def give_prompts(self, rows: Sequence[Row]) -> None:
        """Give the requests of these rows what came of their prompts, and the experts of their tokens."""
        for i, records in self.prompt_logprobs.items():
            request, _ = rows[i]
            request.prompt_logprobs = [*(request.prompt_logprobs or ()), *records]
        for i, vector in self.pooled.items():
            rows[i][0].add_pooled(vector)
        for i, (start, ids) in self.routed.items():
            rows[i][0].add_routed(start, ids)


class Engine(Protocol):
    """Runs iterations, at most `n_workers` + 1 in flight; the scheduler waits for them in the order of issue.

    Both methods raise EngineError. All iterations in flight are then lost.
    """

    @property
    def n_workers(self) -> int:
        """The number of inter-layer partitions, and so of batches that keep all of them busy."""
        ...

    @property
    def keeps_tokens(self) -> bool:
        """Whether sampled tokens stay on the device, so a request can be issued before its token returns."""
        ...

    def issue(self, rows: Sequence[Row]) -> Iteration:
        """Start one iteration of the model, without waiting for a device.

        The requests have their rows and blocks, but their state is still that of before the iteration. A
        request whose last token has not returned continues with the token on the device.
        """
        ...

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        """Wait for the oldest iteration in flight; None if `interrupted` returned True before it was done.

        If `interrupted` is `never`, the engine need not call it.
        """
        ...
