"""The kind of a request that has ended elsewhere: what is left to tell of it."""

from collections.abc import Sequence

from orca_jax.request.beam_search import Hypothesis
from orca_jax.request.request import RowKind


class Ended(RowKind):
    """The outputs that a beam search found, and what became of a prediction, as in RowKind."""

    def __init__(
        self, found: Sequence[Hypothesis] | None = None, predicted: tuple[int, int] | None = None
    ) -> None:
        self._found = found
        self._predicted = predicted

    @property
    def found(self) -> Sequence[Hypothesis] | None:
        return self._found

    @property
    def predicted(self) -> tuple[int, int] | None:
        return self._predicted
