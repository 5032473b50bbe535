"""A policy that cuts prompts into random pieces."""

import random
from collections.abc import Collection, Iterable

from orca_jax.request.request import Request
from orca_jax.scheduling.policy import Choice, Policy


class RandomPieces:
    """Takes the rows of the policy `whole`, each with all of its tokens or a random number of them."""

    def __init__(self, whole: Policy, rng: random.Random) -> None:
        self.n_pieces = 0  # rows that were cut
        self._whole = whole
        self._rng = rng

    def choose(
        self,
        pool: Iterable[Request],
        n_rsrv: int,
        ahead: Collection[Request],
        alone: Request | None = None,
    ) -> Choice:
        choice = self._whole.choose(pool, n_rsrv, ahead, alone)
        rows = choice.rows
        cut = [(req, self._rng.choice((n, self._rng.randint(1, n)))) for req, n in rows]
        self.n_pieces += sum(ours != whole for ours, whole in zip(cut, rows, strict=True))
        return choice._replace(rows=cut)
