"""Algorithm 1 of ORCA (4.2), lines 17 to 28: which requests run in the next iteration.

The paper's line numbers stand beside the code.
"""

import math
from collections.abc import Collection, Iterable

from orca_jax.iteration.row import Row
from orca_jax.request.request import Request, RequestState
from orca_jax.scheduling.kv_manager import round_up
from orca_jax.scheduling.request_pool import InArrivalOrder

INITIATION, RUNNING, INCREMENT, _ = RequestState


def may_run_ahead(req: Request) -> bool:
    """Whether a RUNNING request may be issued once more: its token on the way is not the last it may have."""
    return req.n_in_flight == 1 and req.ending is None and req.n_tokens_issued < req.max_tokens


def running_ahead(rows: Iterable[Row]) -> frozenset[Request]:
    """Of the batch in flight that returns next those that may be issued once more.

    Of no other batch: before their tokens are there the workers have the batches between to run.
    """
    return frozenset([req for req, _ in rows if may_run_ahead(req)])


def select(
    pool: Iterable[Request],
    n_rsrv: int,
    *,
    max_bs: int,
    n_slots: int,
    max_batch_tokens: int | None = None,
    block_size: int = 1,
    ahead: Collection[Request] = (),
) -> tuple[list[Request], int]:
    """The batch of the next iteration, and the slots that are reserved with it, as the paper's Select has it.

    With the defaults it is the paper's to the letter; see `select_rows`.
    """
    rows, n_rsrv = select_rows(
        pool,
        n_rsrv,
        max_bs=max_bs,
        n_slots=n_slots,
        max_batch_tokens=max_batch_tokens,
        block_size=block_size,
        ahead=ahead,
    )
    return [req for req, _ in rows], n_rsrv


def select_rows(
    pool: Iterable[Request],
    n_rsrv: int,
    *,
    max_bs: int,
    n_slots: int,
    max_batch_tokens: int | None = None,
    block_size: int = 1,
    ahead: Collection[Request] = (),
) -> tuple[list[Row], int]:
    """The rows of the next iteration, and the slots that are reserved with it (Algorithm 1, lines 17 to 28).

    Each row has all tokens that its request has left to compute. Changes nothing. Those of `ahead` may run
    although they are RUNNING. `max_batch_tokens` bounds the tokens of the batch, and with `block_size` a
    reservation is of whole blocks, so that it can be allocated; `n_rsrv` is then a multiple of the block, and
    `n_slots` counts as if it were rounded down to one.
    """
    batch: list[Row] = []  # line 18
    if not isinstance(pool, InArrivalOrder):  # in order already; sorting it would read all that wait
        pool = sorted(pool, key=lambda req: req.arrival)  # line 20
    ready = (req for req in pool if req.state is not RUNNING or req in ahead)  # line 19
    batch_tokens = 0
    token_limit = math.inf if max_batch_tokens is None else max_batch_tokens
    for req in ready:  # line 21
        if len(batch) == max_bs:  # line 22
            break
        n_tokens = 1 if req.state is INCREMENT or req.n_in_flight > req.n_pieces else req.n_to_compute
        batch_tokens += n_tokens
        if batch_tokens > token_limit:  # a break, as in line 25, so that no later request overtakes
            break
        # One that has a row already runs again after a fault, and holds its reservation.
        if req.state is INITIATION and req.row < 0:  # line 23
            new_n_rsrv = n_rsrv + round_up(req.max_tokens, block_size)  # line 24
            if new_n_rsrv > n_slots:  # line 25
                break
            n_rsrv = new_n_rsrv  # line 26
        batch.append((req, n_tokens))  # line 27
    return batch, n_rsrv  # line 28
