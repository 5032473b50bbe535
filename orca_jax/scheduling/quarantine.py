"""Finds the request that makes workers die: suspects run alone until one kills a worker.

The paper does not handle faults. Without this, such a request would be retried after every restart until the
engine fails for all users.
"""

from collections.abc import Collection
from typing import NamedTuple

from orca_jax.errors import LossCause
from orca_jax.request.request import Request, RequestState

_GROWTH = 4  # factor on the number of tokens to generate alone, for each further fault
# After so many losses at the same token while it ran alone, a request is ended although it may be innocent.
# Together with the first loss they stay within RestartBound's default, beyond which all requests would end.
_MOST_STUCK = {LossCause.MEMORY: 2, LossCause.UNKNOWN: 3, LossCause.OUTSIDE: 4}


class Suspicion(NamedTuple):
    """The requests in flight at a loss, and the culprit among them if it is known."""

    present: frozenset[Request]
    culprit: Request | None


class Quarantine:
    """The live suspects. For the scheduler's thread.

    A request that was in flight at a loss must run past that token alone before it may be batched again. If
    workers fail (LossCause.FAULT) at a fixed token of a request, the second loss identifies it. If they fail
    at random tokens, the request may get past this one; each further fault while it is in flight makes it run
    alone for longer.

    A loss of another cause is no evidence by itself: operators and the kernel's out-of-memory killer end
    workers whatever they run. Only a request that never gets one token further when it runs alone is ended
    for such losses, since it would be retried for ever.
    """

    def __init__(self) -> None:
        self._suspects: list[Request] = []  # oldest first

    def record_loss(self, present: Collection[Request], cause: LossCause) -> Suspicion:
        """Record a loss while the requests in `present` were in flight; some of them may have ended."""
        culprit = None
        alone = len(present) == 1
        for req in present:
            req.n_losses += 1
            req.n_faults += cause is LossCause.FAULT
            if req.n_tokens != req.lost_at:
                req.lost_at, req.n_stuck = req.n_tokens, 0
            req.n_stuck += alone
            # Up to the last token in flight; for a prompt chunk, which has none, one token.
            req.alone_until = req.n_tokens + max(1, req.n_in_flight - req.n_partial)
            if req.n_faults > 1:
                req.alone_until += _GROWTH ** (req.n_faults - 1)
            guilty = req.n_faults > 1 if cause is LossCause.FAULT else req.n_stuck >= _MOST_STUCK[cause]
            if guilty and alone and req.state is not RequestState.FINISHED:
                culprit = req
        suspects = {*self._suspects, *present} - {culprit}
        self._suspects = sorted(suspects, key=lambda req: req.arrival)
        return Suspicion(frozenset(present), culprit)

    def next(self) -> Request | None:
        """The request that must run alone now: the oldest suspect."""
        if self._suspects:  # rare
            live = (req for req in self._suspects if req.state is not RequestState.FINISHED)
            self._suspects = [req for req in live if req.n_tokens < req.alone_until]
        return self._suspects[0] if self._suspects else None
