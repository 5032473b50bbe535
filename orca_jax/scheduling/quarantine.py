"""Which request may have cost a worker: suspects run alone, and one that then costs another is ended.

The paper leaves faults out. A request that makes workers die would run again each time that they come back,
until the engine fails for everybody.
"""

from collections.abc import Collection
from typing import NamedTuple

from orca_jax.request.request import Request, RequestState

_GROWTH = 4  # times as many tokens alone, for each loss more


class Suspicion(NamedTuple):
    """The requests that were in flight when a worker was lost, and the one of them that did it, where that is
    plain.
    """

    present: frozenset[Request]
    guilty: Request | None


class Quarantine:
    """The live requests on trial. For the scheduler's thread.

    A request that was in flight at a loss has to come past that place with nothing else in flight, before it
    runs beside others again. So one that fails at a certain token is found at the second loss. One that fails
    at random may come past: with each further loss that it was present at, it runs alone for longer.
    """

    def __init__(self) -> None:
        self._on_trial: list[Request] = []  # oldest first

    def take_loss(self, present: Collection[Request]) -> Suspicion:
        """A worker was lost while these were in flight; some of them may have ended."""
        guilty = None
        for req in present:
            req.n_losses += 1
            # Up to the last token that was on its way, or the one that its prompt would have led to.
            req.alone_until = req.n_tokens + max(1, req.n_in_flight - req.n_pieces)
            if req.n_losses > 1:
                req.alone_until += _GROWTH ** (req.n_losses - 1)
                if len(present) == 1 and req.state is not RequestState.FINISHED:
                    guilty = req
        on_trial = {*self._on_trial, *present} - {guilty}
        self._on_trial = sorted(on_trial, key=lambda req: req.arrival)
        return Suspicion(frozenset(present), guilty)

    def next(self) -> Request | None:
        """The request that is to run alone now: the oldest that is on trial."""
        if self._on_trial:  # seldom
            self._on_trial = [req for req in self._on_trial if _is_on_trial(req)]
        return self._on_trial[0] if self._on_trial else None


def _is_on_trial(req: Request) -> bool:
    return req.state is not RequestState.FINISHED and req.n_tokens < req.alone_until
