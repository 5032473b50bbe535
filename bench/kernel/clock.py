"""How the kernel benchmark times: calls chained in one program, many programs in flight, one wait.

A call's result is the next call's query, as between layers, and the program holds `n_calls` of them in a
row: nothing can be left out, moved or run side by side, and nothing stands between two calls. Each call has
keys and values of its own, as many sets as exceed the L2 cache where they are small. Programs are issued one
behind the other for some 20 ms and waited for once; the time of a call is that over the number of calls.
Nothing is subtracted. Where the host needs as long to issue a call as the call takes, `host` shows it.

Keys and queries have a spread of 1; a value's spread grows with the square root of its position, so that a
result has about a query's spread, at every position, and a chain of them neither dies away nor grows.
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
    """Seconds of one call: median, least and most over the repeats; and the host's, to issue it."""

    median: float
    least: float
    most: float
    host: float


def chain(call: Call) -> Callable[[Any, Any, Sequence[Any]], tuple[Any, Any]]:
    """`run(q, shared, sets)`: `call(q, shared, one)` for one set after the other, each on the last's result.

    Returns the last call's result and the first's.
    """
    inner = jax.jit(call)  # traced once, however many calls there are

    def run(q: Any, shared: Any, sets: Sequence[Any]) -> tuple[Any, Any]:
        results = []
        for one in sets:
            q = inner(q, shared, one)
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
    """Time `run`, which issues `n_calls` calls and returns at once: `repeat` times `at_least` seconds.

    Before, `alone` runs are waited for one by one, which shows the host's part.
    """
    for _ in range(warm_up):
        jax.block_until_ready(run())
    host, once = [], []
    for _ in range(alone):
        start = time.perf_counter()
        last = run()
        host.append(time.perf_counter() - start)  # the device was idle: its queue cannot have been full
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
    """The spread of the value at `position`: with it a chained result settles at a variance of a half.

    n keys with scores of variance s have weights whose squares sum to exp(s) / n; with values of variance
    2 c (position + 1) the result's is c exp(s), and c = exp(-1/2) / 2 makes 1/2 the point where both agree.
    """
    return np.sqrt(math.exp(-0.5) * (position + 1)).astype(np.float32)
