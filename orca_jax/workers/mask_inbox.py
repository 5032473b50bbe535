"""The inbox in which a worker's device waits for the token masks of constrained rows."""

import threading

from orca_jax.errors import EngineError
from orca_jax.grammar.token_mask import Words


class MaskInbox:
    """Mask words by iteration, for one epoch at a time; one thread puts them in, another waits for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._epoch = 0
        self._timeout = 0.0
        self._words: dict[int, Words] = {}

    def begin(self, epoch: int, timeout: float) -> None:
        """Begin an epoch: end waits of the previous one, and limit new ones to `timeout` seconds."""
        with self._changed:
            self._epoch, self._timeout = epoch, timeout
            self._words.clear()
            self._changed.notify_all()

    def put(self, epoch: int, iteration: int, words: Words) -> None:
        """Store an iteration's words; drops words of another epoch."""
        with self._changed:
            if epoch == self._epoch:
                self._words[iteration] = words
                self._changed.notify_all()

    def take(self, epoch: int, iteration: int) -> Words:
        """Wait for an iteration's words. Raises EngineError after a timeout or if another epoch has begun."""
        with self._changed:
            self._changed.wait_for(lambda: epoch != self._epoch or iteration in self._words, self._timeout)
            if epoch != self._epoch:
                raise EngineError(f"epoch {epoch} was abandoned")
            if iteration not in self._words:
                late = f"within {self._timeout:g} seconds"
                raise EngineError(f"the token masks of iteration {iteration} did not arrive {late}")
            return self._words.pop(iteration)
