"""The requests of each load that `orca bench` measures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from server.load.trace import Trace, scaled, shrunk, uniform_trace
from server.load.trace_files import read_trace

_GAPS = 2  # the stream of a seed for the times between arrivals; the others are the trace's


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of `concurrency` requests at once, or an open one of `rate` requests a second.

    With neither, requests arrive as in the trace. An open loop may be limited by `concurrency` too.
    """

    rate: float | None = None
    concurrency: int | None = None

    @property
    def label(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g}/s"
        return "the trace" if self.concurrency is None else f"{self.concurrency} at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The requests that all loads have in common: their number, lengths, tokens, and perhaps a file's."""

    number: int | None
    n_input: tuple[int, int]
    n_output: tuple[int, int]
    vocab_size: int
    seed: int
    file: Path | None = None
    speed: float = 1.0
    shrink: int = 1

    def trace(self, load: Load, number: int, burstiness: float = 1.0) -> Trace:
        """The requests of load `number`, whose prompts differ from those of every other load.

        Raises TraceError, and OSError for a file that cannot be read.
        """
        seed = self.seed * 1000 + number
        if self.file is not None:
            trace = read_trace(self.file, vocab_size=self.vocab_size, seed=seed, most=self.number)
            trace = shrunk(trace, self.shrink)
            if load.rate is None and load.concurrency is None:
                return scaled(trace, 1 / self.speed)
        else:
            trace = uniform_trace(
                self.number or 100,
                n_input=self.n_input,
                n_output=self.n_output,
                vocab_size=self.vocab_size,
                seed=seed,
            )
        n_first = sum(request.after is None for request in trace)
        times = iter(arrivals(n_first, load.rate, burstiness, seed))
        return tuple(
            replace(request, arrival=next(times)) if request.after is None else request for request in trace
        )


def arrivals(n: int, rate: float | None, burstiness: float, seed: int) -> Sequence[float]:
    """Arrival times in seconds, the first at 0; all 0 without a rate.

    The times between arrivals have a gamma distribution with the shape `burstiness` and the mean 1 / rate: an
    exponential one at 1, all equal at infinity.
    """
    if rate is None or rate == math.inf:
        return [0.0] * n
    if burstiness == math.inf:
        return [i / rate for i in range(n)]
    gaps = np.random.default_rng([seed, _GAPS]).gamma(burstiness, 1 / (burstiness * rate), n - 1)
    return [0.0, *np.cumsum(gaps).tolist()]
