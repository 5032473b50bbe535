# pyright: reportAssignmentType=false
# ruff: noqa: B023 - `pl.when` and `pl.loop` call the function at once
"""Tiles: several query tokens of one row, over all or some of the row's keys.

A tile has 2 * Q query rows: the same tokens for up to 8 packed heads of one key/value head. Each computing
warp group takes half of the tokens (Q rows, head by head), and both share the keys. Tiles of padding have no
keys and give zeros. The result of a whole tile goes to the output, that of a part to the arrays that `merge`
reads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from orca_jax.pallas.kernel_shape import Q
from orca_jax.pallas.mosaic_forms import TILE_ROW, laid_out
from orca_jax.pallas.ring import fetch_item, n_steps
from orca_jax.pallas.running_softmax import Carry, Mask, attend, next_turn, nothing_yet, over_slots
from orca_jax.pallas.staging import load_queries, put_part, stage
from orca_jax.pallas.thread_block import CoreItem, ThreadBlock, tiles
from orca_jax.pallas.work_list.work_items import ITEM


def fetch_tile(here: ThreadBlock, i: Any, step: Any) -> Any:
    """Fetch the keys and values of this core's tile i. Returns the next step."""
    item = tiles(here).item(i)
    kv_head, _ = _heads(here, item)
    return fetch_item(here, item, kv_head, step)


def compute_tile(here: ThreadBlock, i: Any, step: Any) -> Any:
    """Compute this warp group's half of the core's tile i. Returns the next step."""
    item, work, size = tiles(here).item(i), here.work, here.shape.tokens
    skipped = size * here.group
    token = work[item.record, ITEM.token] + skipped
    n = jnp.clip(work[item.record, ITEM.n_queries] - skipped, 0, size)
    position = work[item.record, ITEM.position] + skipped
    kv_head, first = _heads(here, item)
    queries = [here.q.at[pl.ds(token, size), first + i, kv_head] for i in range(here.shape.plan.packed)]
    # A warp group without tokens still runs, on leftover queries, because both must call `attend` equally
    # often.
    pl.when(n > 0)(lambda: load_queries(here, queries))
    n_all = n_steps(here, item)
    carry = _attended(here, item, position, n_all, step)
    _, total, sums = carry
    stage(here, sums, total)
    if here.shape.plan.cuts_tiles:
        pl.when(item.part < 0)(lambda: _put_rows(here, token, item, n))
        pl.when(item.part >= 0)(lambda: _put_part(here, carry, item.part))
    else:
        _put_rows(here, token, item, n)
    plgpu.wait_smem_to_gmem(0)
    return step + n_all


def _heads(here: ThreadBlock, item: CoreItem) -> tuple[Any, Any]:
    """A tile's key/value head, and the first of its packed heads in that head's group."""
    plan = here.shape.plan
    each = plan.group // plan.packed
    if each == 1:
        return item.head, 0
    return lax.div(item.head, each), lax.rem(item.head, each) * plan.packed


def _attended(here: ThreadBlock, item: CoreItem, position: Any, n_all: Any, step: Any) -> Carry:
    """Attend to all the item's keys, alternating with the other warp group."""
    size, begin, end, tokens = here.shape.step, item.begin, item.end, here.shape.tokens
    window = here.shape.plan.window
    row = lax.broadcasted_iota(jnp.int32, (Q,), 0)
    row = laid_out(row, TILE_ROW, interpret=here.shape.interpret)
    last_key = (row if tokens == Q else lax.rem(row, tokens)) + position
    seen_by_all = jnp.minimum(position + 1, end)
    n_whole = jnp.clip(lax.div(jnp.maximum(seen_by_all - begin, 0), size), 0, n_all)

    n_head = None
    if window is not None:
        # The slots that begin before the last query's window; later slots have no key before any window.
        before = position + tokens - window - begin
        n_head = jnp.clip(lax.div(jnp.maximum(before, 0) + (size - 1), size), 0, n_all)
        n_whole = jnp.maximum(n_whole, n_head)

    def slot(j: Any, carry: Carry, *, masked: bool) -> Carry:
        mask = Mask(begin + j * size, end, last_key, window) if masked else None
        return attend(here, carry, step + j, mask, in_turns=True)

    pl.when(here.group == 1)(lambda: next_turn(here))
    carry = over_slots(
        partial(slot, masked=False),
        partial(slot, masked=True),
        nothing_yet(here.shape),
        n_head,
        n_whole,
        n_all,
    )
    pl.when(here.group == 0)(lambda: next_turn(here))
    return carry


def _put_rows(here: ThreadBlock, token: Any, item: CoreItem, n: Any) -> None:
    """Copy the staged rows of the first n tokens to the output, for each head."""
    kv_head, first = _heads(here, item)
    tokens = here.shape.tokens

    def put_head(i: Any) -> None:
        # The next tokens belong to another row, so copies have 64, 32, ... 1 rows, by the bits of n.
        size = tokens
        while size:
            at = n & ~(2 * size - 1)

            @pl.when(n & size != 0)
            def _():
                plgpu.copy_smem_to_gmem(
                    here.staged.at[here.group, pl.ds(i * tokens + at, size)],
                    here.out.at[pl.ds(token + at, size), first + i, kv_head],
                )

            size //= 2

    _each(here.shape.plan.packed, put_head)


def _each(n: int, body: Callable[[Any], None]) -> None:
    """Call `body` with 0 to n - 1, in a loop if there is more than one."""
    if n == 1:
        body(0)
    else:
        pl.loop(0, n)(body)


def _put_part(here: ThreadBlock, carry: Carry, part: Any) -> None:
    """Copy all staged rows to the arrays that `merge` reads."""
    rows = pl.ds(Q * here.group, Q)
    put_part(
        here,
        carry,
        [here.tile_part.at[i, part, rows] for i in range(here.shape.n_rounded)],
        here.tile_part_top.at[part, rows],
        n_rows=Q,
        n_tops=Q,
    )
