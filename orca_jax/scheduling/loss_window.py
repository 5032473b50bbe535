"""The recent losses of workers: the one count that every limit on restarts uses."""

from collections import deque
from collections.abc import Collection

from orca_jax.config import RestartBound


class LossWindow:
    """Losses within the last `bound.seconds`. Times come from one monotonic clock, in seconds.

    `len` is the number of losses that count.
    """

    def __init__(self, bound: RestartBound) -> None:
        self._bound = bound
        self._losses: deque[tuple[float, Collection[object]]] = deque()  # time, requests in flight

    def __len__(self) -> int:
        return len(self._losses)

    def add(self, now: float, present: Collection[object] = ()) -> bool:
        """Count a loss while the requests `present` were in flight; False if it exceeds the bound."""
        while self._losses and self._losses[0][0] <= now - self._bound.seconds:
            self._losses.popleft()
        self._losses.append((now, present))
        return len(self._losses) <= self._bound.restarts

    def forgive(self, culprit: object) -> None:
        """Stop counting the losses at which the culprit was present."""
        self._losses = deque(loss for loss in self._losses if culprit not in loss[1])
