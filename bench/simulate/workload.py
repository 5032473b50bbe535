"""Requests for a simulation: lengths and arrivals without token ids, so that a million fit in memory.

The paper's are those of bench/trace.py, drawn in the same order from the same seed; prompts of equal length
share one tuple, since a simulated engine does not look at tokens.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from server.load.trace import PAPER_INPUTS, PAPER_OUTPUTS

Lengths = npt.NDArray[np.int64]
_ARRIVALS = 1  # as in bench/trace.py: the second stream of a seed
_SAMPLING = SamplingParams(max_tokens=1, ignore_eos=True)  # only the Request's max_tokens matters


@dataclass(frozen=True, slots=True)
class Workload:
    """Input and output tokens of each request, `[n]`, and its arrival: seconds, ascending, `[n]`."""

    n_inputs: Lengths
    n_outputs: Lengths
    arrivals: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.arrivals)

    def requests(self) -> Iterator[tuple[float, Request]]:
        """Each request with its arrival."""
        lengths = zip(self.n_inputs.tolist(), self.n_outputs.tolist(), strict=True)
        for i, (arrival, (n_input, n_output)) in enumerate(zip(self.arrivals.tolist(), lengths, strict=True)):
            yield arrival, Request(str(i), prompt(n_input), n_input + n_output, _SAMPLING, seed=0)

    def part(self, which: Any) -> "Workload":
        """Only the selected requests: a mask or a slice."""
        return Workload(self.n_inputs[which], self.n_outputs[which], self.arrivals[which])


@cache
def prompt(n_input: int) -> tuple[int, ...]:
    """A prompt of `n_input` tokens."""
    return (0,) * n_input


def poisson(n_requests: int, rate: float, seed: int) -> npt.NDArray[np.float64]:
    """Arrivals of a Poisson process of `rate` requests per second, `[n]`, as drawn by bench/trace.py."""
    gaps = np.random.default_rng([seed, _ARRIVALS]).exponential(size=n_requests)
    return np.cumsum(gaps) / rate


def paper_workload(n_requests: int, *, rate: float, seed: int = 0) -> Workload:
    """U(32, 512) tokens in and U(1, 128) out (ORCA 6.2): lengths and arrivals of `paper_trace`."""
    rng = np.random.default_rng(seed)
    n_inputs = rng.integers(PAPER_INPUTS[0], PAPER_INPUTS[1] + 1, n_requests)
    n_outputs = rng.integers(PAPER_OUTPUTS[0], PAPER_OUTPUTS[1] + 1, n_requests)
    return Workload(n_inputs, n_outputs, poisson(n_requests, rate, seed))


@dataclass(frozen=True, slots=True)
class Tails:
    """Log-normal lengths of `sigma` with the means of the paper's trace, cut at its bounds; 0: uniform ones.

    Cutting lowers the mean, so the median is chosen to give the right mean after cutting.
    """

    sigma: float
    most_input: int = 1536
    most_output: int = 512

    def __call__(self, n_requests: int, *, rate: float, seed: int = 0) -> Workload:
        """Draw `n_requests` requests."""
        if not self.sigma:
            return paper_workload(n_requests, rate=rate, seed=seed)
        rng = np.random.default_rng(seed)
        n_inputs = _lognormal(rng, n_requests, sum(PAPER_INPUTS) / 2, self.sigma, self.most_input)
        n_outputs = _lognormal(rng, n_requests, sum(PAPER_OUTPUTS) / 2, self.sigma, self.most_output)
        return Workload(n_inputs, n_outputs, poisson(n_requests, rate, seed))


MakeWorkload = Callable[..., Workload]  # (n_requests, *, rate, seed=0)


def lognormal_lengths(n: int, mean: float, sigma: float, most: int, *, seed: int) -> Lengths:
    """`n` log-normal integers from 1 to `most`, with the expected mean `mean`."""
    return _lognormal(np.random.default_rng(seed), n, mean, sigma, most)


def _lognormal(rng: np.random.Generator, n: int, mean: float, sigma: float, most: int) -> Lengths:
    normal = rng.standard_normal(n)
    quantiles = np.random.default_rng(0).standard_normal(1 << 17)

    def lengths(normal: npt.NDArray[np.float64], median: float) -> Lengths:
        return np.clip(np.rint(median * np.exp(sigma * normal)), 1, most).astype(np.int64)

    low, high = 1.0, float(most)
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if lengths(quantiles, middle).mean() > mean else (middle, high)
    return lengths(normal, low)
