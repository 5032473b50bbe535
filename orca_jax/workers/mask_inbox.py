"""Where a worker's device waits for the allowed tokens of an iteration's constrained rows."""

import threading

from orca_jax.errors import EngineError
from orca_jax.grammar.token_mask import Words


class WordsBox:
    """Words by iteration, for one epoch at a time; one thread puts them in, another waits for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._epoch = 0
        self._patience = 0.0
        self._words: dict[int, Words] = {}

    def begin(self, epoch: int, patience: float) -> None:
        """Begin an epoch: waits for the one before end, and new ones last `patience` seconds at most."""
        with self._changed:
            self._epoch, self._patience = epoch, patience
            self._words.clear()
            self._changed.notify_all()

    def put(self, epoch: int, iteration: int, words: Words) -> None:
        """Hand words in; those of another epoch are dropped."""
        with self._changed:
            if epoch == self._epoch:
                self._words[iteration] = words
                self._changed.notify_all()

    def take(self, epoch: int, iteration: int) -> Words:
        """Wait for words. Raises EngineError if they are late, or another epoch has begun."""
        with self._changed:
            self._changed.wait_for(lambda: epoch != self._epoch or iteration in self._words, self._patience)
            if epoch != self._epoch:
                raise EngineError(f"epoch {epoch} was given up")
            if iteration not in self._words:
                late = f"within {self._patience:g} seconds"
                raise EngineError(f"what may be sampled in iteration {iteration} did not come {late}")
            return self._words.pop(iteration)
