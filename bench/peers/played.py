"""The result of playing a trace on an engine, and comparisons of two engines' results."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from server.load.trace import Trace

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Played:
    """One play of a trace: seconds from its start to the last end; and for each request, in the trace's
    order, the latency in seconds since its arrival, the number of output tokens, their ids if known, and the
    seconds from its arrival to the first token if recorded.
    """

    seconds: float
    latency: tuple[float, ...]
    n_tokens: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...] | None = None
    first_token: tuple[float, ...] | None = None

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second over the whole play."""
        return sum(self.n_tokens) / self.seconds

    @property
    def requests_per_second(self) -> float:
        """Requests per second, the paper's throughput."""
        return len(self.latency) / self.seconds

    def normalized_latency_ms(self) -> dict[str, float]:
        """Percentiles over the requests of latency over generated tokens (ORCA 6.2), in milliseconds per
        token.

        A request without output counts as one token.
        """
        each = [1e3 * s / max(1, n) for s, n in zip(self.latency, self.n_tokens, strict=True)]
        return _percentiles(each)

    def first_token_ms(self) -> dict[str, float] | None:
        """Percentiles over the requests of the time to the first token, in milliseconds."""
        return None if self.first_token is None else _percentiles([1e3 * s for s in self.first_token])

    def missing(self, trace: Trace) -> int:
        """The number of requested output tokens that are missing."""
        return sum(max(0, request.n_output - n) for request, n in zip(trace, self.n_tokens, strict=True))


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(values, q)) for q in PERCENTILES}


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of two engines' greedy tokens.

    `tokens` is the share of all tokens before their request's first difference; None if an engine does not
    return its tokens.
    """

    requests: int
    of: int
    tokens: float

    def __str__(self) -> str:
        return f"{self.requests} of {self.of}"


def agreement(one: Played, other: Played) -> Agreement | None:
    """The agreement of two plays of one trace."""
    if one.token_ids is None or other.token_ids is None:
        return None
    pairs = list(zip(one.token_ids, other.token_ids, strict=True))
    same = sum(_n_same(*pair) for pair in pairs)
    longest = sum(max(len(mine), len(theirs)) for mine, theirs in pairs)
    return Agreement(sum(mine == theirs for mine, theirs in pairs), len(pairs), same / max(1, longest))


def _n_same(one: Sequence[int], other: Sequence[int]) -> int:
    for n, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return n
    return min(len(one), len(other))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' ratios, because a disturbance in a round affects both engines."""
    return median(one / other for one, other in zip(ours, theirs, strict=True))
