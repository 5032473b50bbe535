"""Entries: the single query of a decode row, over all or some of the row's keys.

A tile of the matrix unit holds all G query heads of a key/value head, so keys and values are read once for
them. The two computing warp groups take alternate slots of the ring; then the second one's result is added to
the first one's. A whole row's result goes to the output, a part's to the arrays that `merge` reads.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from orca_jax.pallas.kernel_shape import Q
from orca_jax.pallas.mosaic_forms import TILE_ROW, along_rows, laid_out, load_plain, load_row_plain
from orca_jax.pallas.ring import fetch_item, n_steps, skip_slot
from orca_jax.pallas.running_softmax import Carry, Mask, attend, nothing_yet, over_slots
from orca_jax.pallas.staging import load_queries, put_part, stage
from orca_jax.pallas.thread_block import CoreItem, ThreadBlock, entries
from orca_jax.pallas.work_list.work_items import ITEM


def fetch_entry(here: ThreadBlock, i: Any, step: Any) -> Any:
    """Fetch the keys and values of this core's entry i. Returns the next step."""
    item = entries(here).item(i)
    return fetch_item(here, item, item.head, step)


def compute_entry(here: ThreadBlock, i: Any, step: Any) -> Any:
    """Compute this warp group's half of the core's entry i. Returns the next step."""
    item = entries(here).item(i)
    token = here.work[item.record, ITEM.token]
    # Copies move multiples of eight rows. Rows after the group's G are loaded too, and their results ignored.
    # The start is traced, so that the copy may have more rows than the array; it fills in zeros.
    heads = pl.ds(jnp.int32(0), here.shape.padded_group)
    load_queries(here, [here.q.at[token, heads, item.head]])
    n = n_steps(here, item)
    carry = _attended(here, item, n, step)
    pl.when((n > 1) & (here.group == 1))(lambda: _give(here, carry))
    carry = lax.cond((n > 1) & (here.group == 0), lambda c: _take(here, c), lambda c: c, carry)

    @pl.when(here.group == 0)
    def _():
        _, total, sums = carry
        stage(here, sums, total)
        rows = here.staged.at[0, pl.ds(0, here.shape.group)]
        out = here.out.at[token, pl.ds(0, here.shape.group), item.head]
        pl.when(item.part < 0)(lambda: plgpu.copy_smem_to_gmem(rows, out))
        pl.when(item.part >= 0)(lambda: _put_part(here, carry, item.part))
        plgpu.wait_smem_to_gmem(0)

    return step + n


def _attended(here: ThreadBlock, item: CoreItem, n: Any, step: Any) -> Carry:
    """Attend to this warp group's share of the item's n slots, and skip the others."""
    size, begin, end, group = here.shape.step, item.begin, item.end, here.group
    window = here.shape.plan.window
    last_key = jnp.full((Q,), end - 1, jnp.int32)
    last_key = laid_out(last_key, TILE_ROW, interpret=here.shape.interpret)
    n_mine = lax.div(n + 1 - group, 2)
    n_whole = lax.div(lax.div(end - begin, size) + 1 - group, 2)

    n_head, n_seen = None, None
    if window is not None:
        # Only the item's first slot, which the first warp group takes, can hold keys before the window.
        first = here.work[item.record, ITEM.position] - (window - 1)
        n_head, n_seen = jnp.where((group == 0) & (begin < first), 1, 0), end - first
        n_whole = jnp.maximum(n_whole, n_head)

    def pair(i: Any, carry: Carry, *, masked: bool) -> Carry:
        at = 2 * i + group
        pl.when(group == 1)(lambda: skip_slot(here, step + at - 1))
        mask = Mask(begin + at * size, end, last_key, n_seen) if masked else None
        carry = attend(here, carry, step + at, mask, in_turns=False)
        pl.when((group == 0) & (at + 1 < n))(lambda: skip_slot(here, step + at + 1))
        return carry

    carry = over_slots(
        partial(pair, masked=False),
        partial(pair, masked=True),
        nothing_yet(here.shape),
        n_head,
        n_whole,
        n_mine,
    )
    pl.when((group == 1) & (lax.rem(n, 2) == 1))(lambda: skip_slot(here, step + n - 1))
    return carry


def _give(here: ThreadBlock, carry: Carry) -> None:
    """Pass the second warp group's result to the first, through the second's half of the staging buffer."""
    top, total, sums = carry
    for rest in (False, True)[: here.shape.n_rounded]:
        stage(here, sums, total, rest=rest)
        if not rest:
            here.top_s[1] = top + jnp.log2(total)
            plgpu.commit_smem()
        plgpu.barrier_arrive(here.given)
        plgpu.barrier_wait(here.taken)


def _take(here: ThreadBlock, carry: Carry) -> Carry:
    """Add the second warp group's result to the first's."""
    top, total, sums = carry
    interpret, shape = here.shape.interpret, (Q, here.shape.head_size)

    def given() -> jax.Array:
        plgpu.barrier_wait(here.given)
        whole = (1, slice(None), slice(None))
        return load_plain(here.staged, whole, interpret=interpret).astype(jnp.float32)

    other = given()
    other_top = load_row_plain(here.top_s, (1,), interpret=interpret)
    plgpu.barrier_arrive(here.taken)
    new_top = jnp.maximum(top, other_top)
    share, other_share = jnp.exp2(top - new_top), jnp.exp2(other_top - new_top)
    sums = sums * along_rows(share, shape) + other * along_rows(other_share, shape)
    if here.shape.n_rounded == 2:
        sums = sums + given() * along_rows(other_share, shape)
        plgpu.barrier_arrive(here.taken)
    return new_top, total * share + other_share, sums


def _put_part(here: ThreadBlock, carry: Carry, part: Any) -> None:
    """Copy the group's staged rows to the arrays that `merge` reads."""
    put_part(
        here,
        carry,
        [here.part.at[i, part] for i in range(here.shape.n_rounded)],
        here.part_top.at[part],
        n_rows=here.shape.group,
        n_tops=here.shape.padded_group,
    )
