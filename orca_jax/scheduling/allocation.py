"""Rows and blocks for the requests of the next iteration, whose slots Algorithm 1's line 26 reserved."""

from collections.abc import Mapping, Sequence

from orca_jax.request.request import Request, Row
from orca_jax.scheduling.cache_kinds import fixed_blocks, slots_to_reserve
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.prefix_lookup import reserve_sharing


def allocate(
    new: Sequence[Request],
    cached: Mapping[Request, list[int]],
    kv: KVManager,
    *,
    on_demand: bool,
    read_in: Mapping[Request, int],
) -> None:
    """Give each new request a row, its cached blocks, and new blocks for the rest.

    The first `read_in` of the new blocks are read in from the host tier.

    A request gets blocks for `max_tokens`, or on demand for the tokens it has. A beam search begins with one
    row of blocks; the others that it can need are promised to it.
    """

    def n_tokens(req: Request) -> int:
        return req.n_tokens if on_demand or req.kind.forks else req.max_tokens

    if kv.prefixes is None:
        for req in new:
            req.row = kv.reserve(n_tokens(req), fixed_blocks(req, kv.block_size))
    else:
        reserve_sharing(new, map(n_tokens, new), cached, kv, read_in)
    for req in new:
        if req.kind.forks:
            n_most = slots_to_reserve(req, kv.block_size) // kv.block_size
            kv.beams.begin(req.row, req.kind.n_rows, None if on_demand else n_most)


def grow(rows: Sequence[Row], kv: KVManager) -> None:
    """Allocate blocks until each of these requests has room for its tokens; beams grow as they continue."""
    slots_of = kv.slots_of
    for req, n_tokens in rows:
        if req.n_computed + n_tokens > slots_of[req.row] and not req.kind.forks:
            kv.grow(req.row, req.n_computed + n_tokens)


def continue_beams(rows: Sequence[Row], kv: KVManager) -> list[tuple[int, int]]:
    """Give the beams of each search in its increment phase the rows and blocks that they continue.

    Returns the blocks to copy before the iteration. Only now is it known which blocks the beams share.
    """
    copies: list[tuple[int, int]] = []
    for req, _ in rows:
        if req.kind.forks and not req.in_initiation:
            copies += kv.beams.proceed(req.row, req.kind.parents, req.n_computed)
    return copies
