"""Histograms that take a whole iteration's values at once: counts in buckets, as Prometheus has them."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MANY = 32  # values from which numpy's fixed cost is less than that of a loop


class Histogram:
    """Counts of values by ascending upper bounds, each inclusive, with one bucket above the last.

    One thread at a time may use it; whoever shares it brings the lock.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._limits: npt.NDArray[np.float64] = np.asarray(self._bounds, np.float64)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Count many values; cheapest from an `array` of doubles."""
        if len(values) < _MANY:
            for value in values:
                self.observe(value)
            return
        numbers = np.asarray(values, np.float64)
        counts = np.bincount(np.searchsorted(self._limits, numbers), minlength=len(self._counts))
        self._counts = [a + b for a, b in zip(self._counts, counts.tolist(), strict=True)]
        self._sum += float(numbers.sum())

    def read(self) -> tuple[list[int], float]:
        """The count of each bucket, the one above the last bound at the end, and the sum of all values."""
        return list(self._counts), self._sum
