"""A request and its states."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.sampling_params import SamplingParams


class RequestState(Enum):
    """The states of Algorithm 1, and the one after them."""

    INITIATION = "initiation"  # next: an iteration over input tokens (prefill)
    RUNNING = "running"  # in one issued batch that has not returned, or two
    INCREMENT = "increment"  # next: an iteration over the last token (decode)
    FINISHED = "finished"


# Looking a member of an Enum up costs more than what is done with it.
_RUNNING, _INCREMENT = RequestState.RUNNING, RequestState.INCREMENT


class FinishReason(StrEnum):
    """Why a request ended; each ends with exactly one."""

    STOP = "stop"  # an end-of-sequence or stop token, a stop string, or a grammar's end
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


class OutputSink(Protocol):
    """Takes a request's tokens as they come, on the scheduler's thread."""

    def push(self, token_id: int) -> bool:
        """Take one token; True when a stop string is now complete."""
        ...


class OutputConstraint(Protocol):
    """Which tokens may come next in a request's output; on the scheduler's thread alone."""

    @property
    def failure(self) -> str | None:
        """Why the output cannot go on; None while it can."""
        ...

    def acts(self, n_output: int) -> bool:
        """Whether it may forbid a token behind `n_output` tokens of output."""
        ...

    def allowed(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], into: npt.NDArray[np.int32]
    ) -> None:
        """Fill in words whose bits say which tokens may come next: bit t % 32 of word t // 32 for token t."""
        ...

    def accept(self, token_id: int) -> bool:
        """Take the token that came; True when the output is complete."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    """One request in the pool. The scheduler alone changes `state`, `output_ids` and what follows them.

    `max_tokens` counts input plus output tokens: what is reserved (Algorithm 1, line 24). `arrival` is
    given by the pool. `row` is the request's place in the block table and in what the device keeps by row,
    from admission to end; -1 outside. One of `end_token_ids` ends the output. `failure` is why this request
    ended with the reason `error`, where it did so alone. `owner` names whoever sent the request, and the
    queue is shared out among owners ("": outside of that); `weight` is what it keeps in memory, in bytes.
    `n_losses` counts the losses of a worker while it was in flight; it runs alone until it has `alone_until`
    tokens (scheduling/quarantine.py).

    An iteration computes the next tokens from `n_computed` on, and samples one where it reaches the last
    known token. So a prompt may come in pieces, begin behind tokens that are in the cache already, or be
    computed again after a loss, when `n_computed` is 0 again.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    seed: int
    end_token_ids: frozenset[int] = frozenset()
    constraint: OutputConstraint | None = None
    sink: OutputSink | None = None
    owner: str = ""
    weight: int = 0
    arrival: int = -1
    state: RequestState = RequestState.INITIATION
    row: int = -1
    output_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])  # of output_ids, if asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # of prompt_ids but the first, if asked for
    n_computed: int = 0  # tokens in the K/V cache, after all iterations that were issued
    n_iterations: int = 0  # issued
    n_in_flight: int = 0  # of these, not returned yet; 2 at most, and 1 without overlap
    n_pieces: int = 0  # of those in flight, the ones that sample no token for it: pieces of its prompt
    n_losses: int = 0
    alone_until: int = 0
    finish_reason: FinishReason | None = None
    failure: str | None = None
    ending: FinishReason | None = None  # asked to end (cancel, timeout); acted on by the scheduler

    @property
    def n_tokens(self) -> int:
        """Tokens known so far, input and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def n_tokens_issued(self) -> int:
        """The same, and those that iterations in flight will add."""
        return len(self.prompt_ids) + len(self.output_ids) + self.n_in_flight - self.n_pieces

    @property
    def n_to_compute(self) -> int:
        """Tokens whose keys and values are not in the cache yet: what the next iterations have to compute."""
        return self.n_tokens_issued - self.n_computed

    @property
    def in_initiation(self) -> bool:
        """Whether its next row is of the initiation phase: it has sampled none since its cache was empty."""
        return self.n_in_flight == self.n_pieces and self.state is not _INCREMENT

    def known_ids(self, start: int, stop: int) -> list[int]:
        """Tokens `start` to `stop` of prompt and output."""
        n = len(self.prompt_ids)
        return [*self.prompt_ids[start:stop], *self.output_ids[max(0, start - n) : max(0, stop - n)]]

    def begin_iteration(self, n_tokens: int) -> bool:
        """An iteration over its next `n_tokens` was issued. Returns whether it samples a token."""
        samples = self.state is _INCREMENT or n_tokens == self.n_to_compute
        self.n_computed += n_tokens
        if not samples:
            self.n_pieces += 1
        self.n_iterations += 1
        self.n_in_flight += 1
        self.state = _RUNNING
        return samples

    def accept(self, token_id: int) -> FinishReason | None:
        """Take the token of a returned iteration; the reason to finish if it was the last one.

        Whatever its sink or its constraint raises ends this request, with the reason `error`, and no other.
        """
        self.output_ids.append(token_id)
        stopped = False
        try:
            if self.sink is not None:
                stopped = self.sink.push(token_id)
            if self.constraint is not None:
                stopped = self.constraint.accept(token_id) or stopped
                self.failure = self.failure or self.constraint.failure
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
        if self.failure is not None:
            return FinishReason.ERROR
        if stopped or token_id in self.end_token_ids:
            return FinishReason.STOP
        if len(self.prompt_ids) + len(self.output_ids) >= self.max_tokens:  # n_tokens, without a call
            return FinishReason.LENGTH
        return None
