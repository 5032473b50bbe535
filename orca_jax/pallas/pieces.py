# pyright: reportAssignmentType=false
"""Items with one query: two pieces, side by side.

A piece is the query of an increment-phase row, all N / K heads of one key/value head packed in one tile, over
a range of its keys. Each of two warp groups takes one, with keys of its own: the even steps are the first's.
The result of a whole row goes where it belongs, that of a piece to where `merge` finds it.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from orca_jax.pallas.kernel_shape import C, Q
from orca_jax.pallas.mosaic_forms import TILE_ROW, laid_out
from orca_jax.pallas.ring import fetch, n_chunks, pass_over
from orca_jax.pallas.running_softmax import attend, nothing_yet
from orca_jax.pallas.staging import load_queries, stage
from orca_jax.pallas.thread_block import ThreadBlock
from orca_jax.pallas.work_items import ENTRY


def _piece(here: ThreadBlock, item: Any, w: Any) -> tuple[Any, Any, Any, Any]:
    """What warp group w has of a pair: record, key/value head, first key, end of keys."""
    n_kv = here.shape.n_kv_heads
    index = 2 * (item - here.n_tile_items) + w
    there = index < here.n_pieces
    index = jnp.where(there, index, 0)
    record = here.shape.plan.first_entry + lax.div(index, n_kv)
    begin = here.work[record, ENTRY.begin]
    return record, lax.rem(index, n_kv), begin, jnp.where(there, here.work[record, ENTRY.end], begin)


def compute_pieces(here: ThreadBlock, item: Any, step: Any) -> Any:
    """A computing warp group's piece of a pair. Returns the step after the pair."""
    shape, work, group, staged = here.shape, here.work, here.group, here.staged
    record, head, begin, end = _piece(here, item, group)
    *_, begin_0, end_0 = _piece(here, item, 0)
    *_, begin_1, end_1 = _piece(here, item, 1)
    n_each = jnp.maximum(n_chunks(begin_0, end_0), n_chunks(begin_1, end_1))
    token, slot = work[record, ENTRY.token], work[record, ENTRY.slot]
    n_rows = shape.plan.padded_group
    load_queries(here, here.q.at[token, pl.ds(head * shape.group, n_rows), here.columns])
    last_key = laid_out(jnp.full((Q,), end - 1, jnp.int32), TILE_ROW, interpret=shape.interpret)
    n_mine = n_chunks(begin, end)

    def chunk(j, carry):
        pl.when(group == 1)(lambda: pass_over(here, step + 2 * j))
        carry = attend(here, carry, step + 2 * j + group, begin + j * C, end, last_key)
        pl.when(group == 0)(lambda: pass_over(here, step + 2 * j + 1))
        return carry

    top, total, sums = lax.fori_loop(0, n_mine, chunk, nothing_yet(shape))

    @pl.loop(2 * n_mine, 2 * n_each)
    def _(j):
        pass_over(here, step + j)

    group_rows = pl.ds(0, shape.group)
    stage(here, sums, 1 / total)

    @pl.when((n_mine > 0) & (slot < 0))
    def _():
        plgpu.copy_smem_to_gmem(
            staged.at[group, group_rows],
            here.out.at[token, pl.ds(head * shape.group, shape.group), here.columns],
        )
        plgpu.wait_smem_to_gmem(0)

    @pl.when((n_mine > 0) & (slot >= 0))
    def _():
        at = slot * shape.n_kv_heads + head
        plgpu.copy_smem_to_gmem(staged.at[group, group_rows], here.part.at[0, at, :, here.columns])
        here.top_s[group] = top + jnp.log2(total)
        plgpu.commit_smem()
        if shape.n_parts == 2:
            plgpu.wait_smem_to_gmem(0)
            stage(here, sums, 1 / total, rest=True)
            plgpu.copy_smem_to_gmem(staged.at[group, group_rows], here.part.at[1, at, :, here.columns])
        plgpu.copy_smem_to_gmem(here.top_s.at[group, pl.ds(0, n_rows)], here.part_top.at[at])
        plgpu.wait_smem_to_gmem(0)

    return step + 2 * n_each


def fetch_pieces(here: ThreadBlock, item: Any, step: Any) -> Any:
    """Fetch the keys and values of a pair. Returns the step after it."""
    record_0, head_0, begin_0, end_0 = _piece(here, item, 0)
    record_1, head_1, begin_1, end_1 = _piece(here, item, 1)
    row_0, row_1 = here.work[record_0, ENTRY.row], here.work[record_1, ENTRY.row]
    n_each = jnp.maximum(n_chunks(begin_0, end_0), n_chunks(begin_1, end_1))

    @pl.loop(0, n_each)
    def _(j):
        fetch(here, row_0, head_0, begin_0 + j * C, end_0, step + 2 * j)
        fetch(here, row_1, head_1, begin_1 + j * C, end_1, step + 2 * j + 1)

    return step + 2 * n_each
