"""Where a worker's device waits for what the constrained rows of an iteration allow."""

import threading

from orca_jax.errors import EngineError
from orca_jax.grammar.token_mask import Words


class WordsBox:
    """Words by iteration, of one epoch at a time; put in on one thread and waited for on another."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._epoch = 0
        self._patience = 0.0
        self._words: dict[int, Words] = {}

    def begin(self, epoch: int, patience: float) -> None:
        """A new epoch: nothing is waited for longer than `patience` seconds, and nothing of epochs before."""
        with self._changed:
            self._epoch, self._patience = epoch, patience
            self._words.clear()
            self._changed.notify_all()

    def put(self, epoch: int, iteration: int, words: Words) -> None:
        """They have come; those of another epoch are dropped."""
        with self._changed:
            if epoch == self._epoch:
                self._words[iteration] = words
                self._changed.notify_all()

    def take(self, epoch: int, iteration: int) -> Words:
        """Wait for them. Raises EngineError where they don't come in time, or another epoch has begun."""
        with self._changed:
            self._changed.wait_for(lambda: epoch != self._epoch or iteration in self._words, self._patience)
            if epoch != self._epoch:
                raise EngineError(f"epoch {epoch} was given up")
            if iteration not in self._words:
                late = f"within {self._patience:g} seconds"
                raise EngineError(f"what may be sampled in iteration {iteration} did not come {late}")
            return self._words.pop(iteration)
