"""How often workers were lost lately: the one count behind every limit on restarts."""

from collections import deque
from collections.abc import Collection

from orca_jax.config import RestartBound


class LossWindow:
    """Losses within the last `bound.seconds`; times are those of one clock and never go back.

    Its length is the number of losses that count.
    """

    def __init__(self, bound: RestartBound) -> None:
        self._bound = bound
        self._losses: deque[tuple[float, Collection[object]]] = deque()  # when, and who was present

    def __len__(self) -> int:
        return len(self._losses)

    def add(self, now: float, present: Collection[object] = ()) -> bool:
        """Count a loss at which these were `present`; False where it is one more than the bound allows."""
        while self._losses and self._losses[0][0] <= now - self._bound.seconds:
            self._losses.popleft()
        self._losses.append((now, present))
        return len(self._losses) <= self._bound.restarts

    def forgive(self, culprit: object) -> None:
        """Count the losses at which the culprit was present no more."""
        self._losses = deque(loss for loss in self._losses if culprit not in loss[1])
