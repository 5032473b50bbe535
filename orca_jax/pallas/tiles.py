# pyright: reportAssignmentType=false
# ruff: noqa: B023 - `pl.when` runs what it is given at once
"""Items with several queries: up to 2 * Q query tokens of one row, one head, over a range of the row's keys.

Two warp groups take Q of the tokens each and share the keys. Tiles of padding see no key, and so get zeros.
The result of a whole tile goes where it belongs, that of a part to where `merge` finds it.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from orca_jax.pallas.core_items import CoreItem, tiles
from orca_jax.pallas.kernel_shape import Q
from orca_jax.pallas.mosaic_forms import TILE_ROW, laid_out
from orca_jax.pallas.ring import fetch_item, n_steps
from orca_jax.pallas.running_softmax import Carry, Mask, attend, next_turn, nothing_yet
from orca_jax.pallas.staging import load_queries, put_part, stage
from orca_jax.pallas.thread_block import ThreadBlock
from orca_jax.pallas.work_list.work_items import ITEM


def fetch_tile(here: ThreadBlock, i: Any, step: Any) -> Any:
    """Fetch the keys and values of this core's i-th tile. Returns the step after it."""
    item = tiles(here).item(i)
    return fetch_item(here, item, lax.div(item.head, here.shape.group), step)


def compute_tile(here: ThreadBlock, i: Any, step: Any) -> Any:
    """A computing warp group's half of this core's i-th tile. Returns the step after it."""
    item, work, group = tiles(here).item(i), here.work, here.group
    token = work[item.record, ITEM.token] + Q * group
    n = jnp.clip(work[item.record, ITEM.n_queries] - Q * group, 0, Q)
    position = work[item.record, ITEM.position] + Q * group
    # Without a token of its own a warp group goes along with what queries it has.
    pl.when(n > 0)(lambda: load_queries(here, here.q.at[pl.ds(token, Q), 0, item.head]))
    n_all = n_steps(here, item)
    carry = _attended(here, item, position, n_all, step)
    _, total, sums = carry
    stage(here, sums, total)
    if here.shape.plan.cuts_tiles:
        pl.when(item.part < 0)(lambda: _put_rows(here, token, item.head, n))
        pl.when(item.part >= 0)(lambda: _put_part(here, carry, item.part))
    else:
        _put_rows(here, token, item.head, n)
    plgpu.wait_smem_to_gmem(0)
    return step + n_all


def _attended(here: ThreadBlock, item: CoreItem, position: Any, n_all: Any, step: Any) -> Carry:
    """All the item's keys taken in, in turns with the other warp group."""
    size, begin, end = here.shape.step, item.begin, item.end
    last_key = lax.broadcasted_iota(jnp.int32, (Q,), 0)
    last_key = laid_out(last_key, TILE_ROW, interpret=here.shape.interpret) + position
    seen_by_all = jnp.minimum(position + 1, end)
    n_whole = jnp.clip(lax.div(jnp.maximum(seen_by_all - begin, 0), size), 0, n_all)
    pl.when(here.group == 1)(lambda: next_turn(here))
    carry = lax.fori_loop(
        0, n_whole, lambda j, carry: attend(here, carry, step + j, in_turns=True), nothing_yet(here.shape)
    )
    carry = lax.fori_loop(
        n_whole,
        n_all,
        lambda j, carry: attend(here, carry, step + j, Mask(begin + j * size, end, last_key), in_turns=True),
        carry,
    )
    pl.when(here.group == 0)(lambda: next_turn(here))
    return carry


def _put_rows(here: ThreadBlock, token: Any, head: Any, n: Any) -> None:
    """The first n rows, which are staged, to where they belong."""
    # Only so many rows are this row's, so copies of 64, 32, ... 1 rows, as the bits of n say.
    size = Q
    while size:
        at = n & ~(2 * size - 1)

        @pl.when(n & size != 0)
        def _():
            plgpu.copy_smem_to_gmem(
                here.staged.at[here.group, pl.ds(at, size)], here.out.at[pl.ds(token + at, size), head]
            )

        size //= 2


def _put_part(here: ThreadBlock, carry: Carry, part: Any) -> None:
    """All rows, which are staged, to where they are merged."""
    rows = pl.ds(Q * here.group, Q)
    put_part(
        here,
        carry,
        [here.tile_part.at[i, part, rows] for i in range(here.shape.n_rounded)],
        here.tile_part_top.at[part, rows],
        n_rows=Q,
        n_tops=Q,
    )
