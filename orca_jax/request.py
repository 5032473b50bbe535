"""A request, its states, and what its user asked of it."""

# What a user hands in is checked when it runs as well, whatever its annotations promise.
# pyright: reportUnnecessaryIsInstance=false

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Protocol

from orca_jax.errors import InvalidSamplingParameter


class RequestState(Enum):
    """The states of Algorithm 1, and the one after them."""

    INITIATION = "initiation"  # next: the iteration over the input tokens (prefill)
    RUNNING = "running"  # in an issued batch that has not returned
    INCREMENT = "increment"  # next: an iteration over the last token (decode)
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended; each ends with exactly one."""

    STOP = "stop"  # an end-of-sequence token or a stop string
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop; checked when made.

    `max_tokens` counts output tokens here, as in OpenAI's API. `temperature` 0 is greedy. `top_k` 0 and
    `top_p` 1 leave every token in. `seed` None: the service draws one and reports it. Raises
    InvalidSamplingParameter, which names the field.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        elif isinstance(self.stop, Sequence):
            object.__setattr__(self, "stop", tuple(self.stop))
        self._integer("max_tokens", 1, 1 << 30)
        self._real("temperature", 0.0, 100.0)
        self._real("top_p", 0.0, 1.0, above_low=True)
        self._integer("top_k", 0, 1 << 30)
        if self.seed is not None:
            self._integer("seed", -(1 << 63), (1 << 63) - 1)
        if not isinstance(self.ignore_eos, bool):
            self._refuse("ignore_eos", "must be true or false")
        if not isinstance(self.stop, tuple) or len(self.stop) > 16:
            count = f"{len(self.stop)} strings" if isinstance(self.stop, tuple) else repr(self.stop)
            message = f"stop is {count:.80}; it must be a string or up to 16 strings"
            raise InvalidSamplingParameter(message, param="stop")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= 1024:
                message = f"stop has {text!r:.80}; each stop string must have 1 to 1024 characters"
                raise InvalidSamplingParameter(message, param="stop")

    def _refuse(self, name: str, rule: str) -> None:
        raise InvalidSamplingParameter(f"{name} is {getattr(self, name)!r}; it {rule}", param=name)

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self._refuse(name, f"must be a whole number from {low} to {high}")

    def _real(self, name: str, low: float, high: float, *, above_low: bool = False) -> None:
        value = getattr(self, name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not low <= value <= high or (above_low and value == low):
            start = f"above {low:g}" if above_low else f"from {low:g}"
            self._refuse(name, f"must be a number {start} to {high:g}")


class OutputSink(Protocol):
    """Takes a request's tokens as they come, on the scheduler's thread."""

    def push(self, token_id: int) -> bool:
        """Take one token; True when a stop string is now complete."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    """One request in the pool. The scheduler alone changes `state`, `output_ids` and what follows them.

    `max_tokens` counts input plus output tokens: what is reserved (Algorithm 1, line 24). `arrival` is
    given by the pool. `row` is the request's place in the block table and in the device's `last_token`,
    from admission to end; -1 outside.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    sink: OutputSink | None = None
    arrival: int = -1
    state: RequestState = RequestState.INITIATION
    row: int = -1
    output_ids: list[int] = field(default_factory=list[int])
    n_iterations: int = 0
    finish_reason: FinishReason | None = None
    ending: FinishReason | None = None  # asked to end (cancel, timeout); acted on by the scheduler

    @property
    def n_tokens(self) -> int:
        """Tokens known so far, input and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    def accept(self, token_id: int) -> FinishReason | None:
        """Take the token of a returned iteration; the reason to finish if it was the last one."""
        self.output_ids.append(token_id)
        stopped = self.sink.push(token_id) if self.sink is not None else False
        if stopped or (token_id in self.eos_token_ids and not self.sampling.ignore_eos):
            return FinishReason.STOP
        if self.n_tokens >= self.max_tokens:
            return FinishReason.LENGTH
        return None
