"""Algorithm 1 of ORCA (4.2), lines 17 to 28: which requests run in the next iteration.

Comments give the paper's line numbers. The paper's initiation is prefill; its increment is decode. A request
is admitted only if slots for all its tokens can be reserved, so no admitted request ever waits for slots. The
loop stops at the first request that does not fit, so that no later one overtakes it.
"""

import math
from collections.abc import Collection, Iterable
from typing import Literal

from orca_jax.request.request import PLAIN, Request, RequestState, Row
from orca_jax.scheduling.cache_kinds import slots_to_reserve
from orca_jax.scheduling.request_pool import InArrivalOrder

INITIATION, RUNNING, INCREMENT, _ = RequestState

# Why a request could not join a batch: the batch is full; too few slots are free; the iteration has no room
# for its tokens; another request is computing a prefix that it can share afterwards; a request that may have
# cost a worker runs alone; a deterministic engine runs an iteration of the other phase; its LoRA adapter is
# on its way to the devices, and policies do not see it; blocks that it may begin with are read from a disk.
Why = Literal["batch", "slots", "tokens", "prefix", "alone", "phase", "adapter", "disk", "transfer"]
Held = tuple[Request, Why]


def running_ahead(rows: Iterable[Row]) -> frozenset[Request]:
    """The RUNNING requests that may be issued again before their token returns, because more can follow.

    `rows` are the batch that returns next. Requests of later batches need not run ahead: the workers have
    other batches to run until then. A row kind whose next rows depend on what comes back, such as a beam
    search, never runs ahead.
    """
    return frozenset(
        [
            req
            for req, _ in rows
            if req.n_in_flight == 1
            # `n_tokens_issued < max_tokens`, inlined for speed.
            and len(req.output_ids) + 1 - req.n_partial < req.most_output
            and req.ending is None
            and (req.kind is PLAIN or req.kind.runs_ahead(req))
        ]
    )


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
    """The paper's Select: the next batch, and the new `n_rsrv`.

    With the defaults it is exactly the paper's function; `select_rows` describes the parameters.
    """
    if not isinstance(pool, InArrivalOrder):  # that one is sorted; sorting it would read the whole queue
        pool = sorted(pool, key=lambda req: req.arrival)  # line 20
    rows, n_rsrv, _ = select_rows(
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
) -> tuple[list[Row], int, Held | None]:
    """The rows of the next iteration, and the new `n_rsrv` (Algorithm 1, lines 17 to 28). Changes nothing.

    Requests are taken in the order of `pool`, so that a policy may have another one; `select` sorts by
    arrival (line 20). Each row computes all tokens that its request has left to compute. Requests in `ahead`
    may be selected although they are RUNNING. `max_batch_tokens` limits the tokens of the batch, including
    encoder tokens. Reservations are rounded up to blocks of `block_size` slots, so that they can be
    allocated; `n_rsrv` is then a multiple of `block_size`, and `n_slots` is in effect rounded down to one.
    The third result is the request at which the loop stopped, and why; None if it reached the pool's end.
    """
    batch: list[Row] = []  # line 18
    batch_tokens = n_places = 0
    token_limit = math.inf if max_batch_tokens is None else max_batch_tokens
    held: Held | None = None
    for req in pool:  # line 21
        state = req.state
        if state is RUNNING and req not in ahead:  # line 19
            continue
        if n_places == max_bs:  # line 22; `n_places` is the batch's size, and counts every beam
            held = req, "batch"
            break
        # An increment has one token. The condition is `not req.in_initiation`, inlined for speed.
        n_tokens = n_rows = 1
        if state is not INCREMENT and req.n_in_flight == req.n_partial:
            n_tokens = req.n_to_compute
            batch_tokens += req.n_to_encode
        if req.kind is not PLAIN:
            n_rows = req.kind.n_rows
        n_places += n_rows
        batch_tokens += n_tokens if n_tokens > n_rows else n_rows
        # Break, as in line 25, so that no later request overtakes this one.
        if batch_tokens > token_limit or n_places > max_bs:
            held = req, "batch" if n_places > max_bs else "tokens"
            break
        # A request that already has a row resumes after a fault and still holds its reservation.
        if state is INITIATION and req.row < 0:  # line 23
            new_n_rsrv = n_rsrv + slots_to_reserve(req, block_size)  # line 24
            if new_n_rsrv > n_slots:  # line 25
                held = req, "slots"
                break
            n_rsrv = new_n_rsrv  # line 26
        batch.append((req, n_tokens))  # line 27
    return batch, n_rsrv, held  # line 28
