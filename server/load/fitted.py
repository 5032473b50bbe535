"""Synthetic traces that resemble a real one: its lengths and times between arrivals by their quantiles.

Input and output lengths keep their rank correlation (by a Gaussian copula); everything else is independent,
so bursts longer than one gap, shared prefixes and conversations are lost. `python -m bench.fit_trace` writes
such a file, and any number of requests can be drawn from it with a seed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from server.load.drawn_prompts import Draw
from server.load.trace import Trace, TracedRequest, input_lengths
from server.load.trace_fields import FieldError, count

SHARES = (0.0, 0.01, *(i / 20 for i in range(1, 20)), 0.99, 1.0)
_NAMES = ("gaps", "n_input", "n_output")


def fit(trace: Trace, source: str) -> dict[str, Any]:
    """The object that describes a trace of two requests or more; its arrivals must not depend on answers."""
    arrivals, n_inputs = [request.arrival for request in trace], input_lengths(trace)
    n_outputs = [request.n_output for request in trace]
    values = dict(zip(_NAMES, (np.diff(arrivals), n_inputs, n_outputs), strict=True))
    quantiles = {name: np.quantile(each, SHARES).round(6).tolist() for name, each in values.items()}
    ranks = np.corrcoef(_ranks(n_inputs), _ranks(n_outputs))[0, 1]
    rank_correlation = 0.0 if math.isnan(ranks) else round(float(ranks), 4)
    return {
        "fitted": {
            "source": source,
            "requests": len(trace),
            **quantiles,
            "rank_correlation": rank_correlation,
        }
    }


def fitted_requests(fields: Mapping[str, Any], draw: Draw) -> Iterator[TracedRequest]:
    """Draw as many requests as are wanted, or as the real trace has. Raises FieldError."""
    made = fields["fitted"]
    if not isinstance(made, dict):
        raise FieldError("fitted", "must be an object")
    gaps, n_input, n_output = (_quantiles(made, name) for name in _NAMES)
    ranks = made.get("rank_correlation", 0.0)
    if not isinstance(ranks, int | float) or not -1 <= ranks <= 1:
        raise FieldError("rank_correlation", f"is {ranks!r}; it must be a number from -1 to 1")
    correlation = 2 * math.sin(math.pi / 6 * ranks)  # of the normal variables with these rank correlations
    share = NormalDist().cdf
    arrival = 0.0
    for _ in range(draw.most or count(made, "requests")):
        one, other = draw.rng.standard_normal(2).tolist()
        other = correlation * one + math.sqrt(max(0.0, 1 - correlation**2)) * other
        n = max(1, round(float(np.interp(share(one), SHARES, n_input))))
        n_out = max(1, round(float(np.interp(share(other), SHARES, n_output))))
        yield TracedRequest(draw.prompt(n), n_out, arrival)
        arrival += float(np.interp(draw.rng.random(), SHARES, gaps))


def _quantiles(fields: Mapping[str, Any], name: str) -> Sequence[float]:
    value = fields.get(name)
    numbers: list[Any] = value if isinstance(value, list) else []
    known = all(isinstance(each, int | float) and 0 <= each < math.inf for each in numbers)
    if len(numbers) != len(SHARES) or not known or numbers != sorted(numbers):
        raise FieldError(name, f"must be {len(SHARES)} ascending numbers, the quantiles {SHARES}")
    return numbers


def _ranks(values: Sequence[int]) -> npt.NDArray[np.float64]:
    """The rank of each value; equal ones have the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[place]
