"""What an engine made of a trace, and what is said of two engines' rounds beside each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from bench.trace import Trace

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Played:
    """One play of a trace: seconds from its start to the last end, and of each request, in the trace's order,
    the latency in seconds from its arrival, and the output tokens that came: how many, and which, where that
    is known.
    """

    seconds: float
    latency: tuple[float, ...]
    n_tokens: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...] | None = None

    @property
    def tokens_per_second(self) -> float:
        """All output tokens that came, over all the seconds."""
        return sum(self.n_tokens) / self.seconds

    @property
    def requests_per_second(self) -> float:
        """Requests over seconds: the paper's throughput."""
        return len(self.latency) / self.seconds

    def normalized_latency_ms(self) -> dict[str, float]:
        """Percentiles over the requests of latency over generated tokens (ORCA 6.2), in milliseconds a token.

        A request that gave no token counts as if it gave one.
        """
        each = [1e3 * s / max(1, n) for s, n in zip(self.latency, self.n_tokens, strict=True)]
        return {f"p{q}": float(np.percentile(each, q)) for q in PERCENTILES}

    def missing(self, trace: Trace) -> int:
        """Output tokens that were asked for and did not come."""
        return sum(max(0, request.n_output - n) for request, n in zip(trace, self.n_tokens, strict=True))


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two engines' greedy tokens are the same.

    `tokens` is the share of all that stand before a request's first difference; None where one of the two
    does not tell its tokens.
    """

    requests: int
    of: int
    tokens: float

    def __str__(self) -> str:
        return f"{self.requests} of {self.of}"


def agreement(one: Played, other: Played) -> Agreement | None:
    """Of two plays of one trace."""
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
    """The median of each round's ratio: what disturbs a round disturbs both."""
    return median(one / other for one, other in zip(ours, theirs, strict=True))
