"""Prometheus-style histograms that can observe all values of an iteration in one call."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MANY = 32  # from this many values on numpy is faster than a loop


class Histogram:
    """Counts of values by ascending, inclusive upper bounds, with one bucket above the last bound.

    Not thread-safe: callers that share it need a lock.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._limits: npt.NDArray[np.float64] = np.asarray(self._bounds, np.float64)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Count many values. An `array` of doubles is fastest."""
        if len(values) < _MANY:
            for value in values:
                self.observe(value)
            return
        numbers = np.asarray(values, np.float64)
        counts = np.bincount(np.searchsorted(self._limits, numbers), minlength=len(self._counts))
        self._counts = [a + b for a, b in zip(self._counts, counts.tolist(), strict=True)]
        self._sum += float(numbers.sum())

    def read(self) -> tuple[list[int], float]:
        """The count of each bucket, in order, ending with the one above the last bound, and the sum."""
        return list(self._counts), self._sum
