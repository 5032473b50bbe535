"""The figures of one policy on one trace."""

from array import array
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Times are in seconds and, like the normalized latency, of the requests that count (traces.py).

    `latency_*` is from arrival to the end, and normalized that over the output's tokens. `first_*` is from
    arrival to the first token, `between_*` between two tokens of a request. `slots_in_use` is the fraction of
    the slots held by the requests of a batch that have a key and value. `n_recomputed` counts tokens computed
    again after preemptions, and `cached_share` is the fraction of all prompt tokens that came from the prefix
    cache. `tokens_s` counts output tokens from the first arrival to the last end.
    """

    n_requests: int
    tokens_s: float
    latency_mean: float
    latency_p99: float
    normalized_p50: float
    normalized_p90: float
    normalized_p99: float
    first_p50: float
    first_p99: float
    between_p50: float
    between_p99: float
    between_most: float
    slots_in_use: float
    n_recomputed: int
    cached_share: float
    n_preemptions: int
    n_iterations: int

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def quantile(values: "array[float]", share: float) -> float:
    """The quantile of the values; 0 if there are none."""
    return float(np.quantile(np.asarray(values), share)) if values else 0.0
