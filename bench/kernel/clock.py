"""The clock of the kernel benchmark: chained calls in one program, many programs in flight, one wait.

Each call's result is the next call's query, as between layers, and a program contains `n_calls` such calls.
No call can therefore be dropped, moved or run concurrently, and nothing runs between two calls. Each call has
its own keys and values; if they are small, there are enough sets to exceed the L2 cache. The programs are
issued without waiting for about 20 ms, followed by one wait. The time of a call is the total over the number
of calls; nothing is subtracted. `host` shows whether the host needs as long to issue a call as the call
takes.

Keys and queries have a standard deviation of 1. A value's grows with the square root of its position, so that
at every position a result is spread like a query, and a chain of results neither vanishes nor grows.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import numpy as np

Call = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: median, least and most over the repeats, and the host's time to issue it."""

    median: float
    least: float
    most: float
    host: float


def chain(call: Call) -> Callable[[Any, Any, Sequence[Any]], tuple[Any, Any]]:
    """A function `run(q, shared, sets)` that calls `call(q, shared, set)` for each set on the previous
    result.

    It returns the last call's result and the first's.
    """
    inner = jax.jit(call)  # traced once for all calls

    def run(q: Any, shared: Any, sets: Sequence[Any]) -> tuple[Any, Any]:
        results = []
        for arrays in sets:
            q = inner(q, shared, arrays)
            results.append(q)
        return q, results[0]

    return run


def time_calls(
    run: Callable[[], object],
    n_calls: int,
    *,
    at_least: float = 0.02,
    repeat: int = 7,
    warm_up: int = 3,
    alone: int = 3,
) -> Timing:
    """Time `run`, which issues `n_calls` calls and returns at once, `repeat` times for `at_least` seconds.

    `alone` runs before that are waited for one by one, to measure the host's part.
    """
    for _ in range(warm_up):
        jax.block_until_ready(run())
    host, once = [], []
    for _ in range(alone):
        start = time.perf_counter()
        last = run()
        host.append(time.perf_counter() - start)  # the device was idle, so its queue was not full
        jax.block_until_ready(last)
        once.append(time.perf_counter() - start)
    n_runs = max(1, min(10_000, math.ceil(at_least / max(min(once), 1e-7))))
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(n_runs - 1):
            run()
        jax.block_until_ready(run())
        times.append((time.perf_counter() - start) / (n_runs * n_calls))
    return Timing(median(times), min(times), max(times), median(host) / n_calls)


def value_spread(position: np.ndarray) -> np.ndarray:
    """The standard deviation of the value at `position`; chained results then settle at a variance of 1/2.

    n keys with scores of variance s have weights whose squares sum to exp(s) / n; with values of variance
    2 c (position + 1) the result's is c exp(s), and c = exp(-1/2) / 2 makes 1/2 the point where both agree.
    """
    return np.sqrt(math.exp(-0.5) * (position + 1)).astype(np.float32)
