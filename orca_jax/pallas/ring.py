# ruff: noqa: B023 - `pl.when` calls the function at once
"""The rings of slots in shared memory that pass keys and values, C per slot, to the computing warp groups.

One warp group fetches, ahead of use and across items; the two that compute read the slots in the same order.
A step is the count of slots so far, on both sides. A slot is free again when both computing warp groups have
released it.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from orca_jax.pallas.thread_block import Block, CoreItem
from orca_jax.pallas.work_list.work_items import ITEM


def slot_of(here: Block, step: Any) -> Any:
    """The rings' slot of a step."""
    return lax.rem(step, here.shape.n_slots)


def n_steps(here: Block, item: CoreItem) -> Any:
    """The number of slots that an item's keys fill."""
    return lax.div(item.end - item.begin + (here.shape.step - 1), here.shape.step)


def fetch_item(here: Block, item: CoreItem, kv_head: Any, step: Any) -> Any:
    """Start the copies of all keys and values of an item. Returns the next step."""
    n, row = n_steps(here, item), here.work[item.record, ITEM.row]
    pl.loop(0, n)(lambda j: _fetch(here, row, kv_head, item.begin + j * here.shape.step, item.end, step + j))
    return step + n


def _fetch(here: Block, row: Any, head: Any, key: Any, end: Any, step: Any) -> None:
    """Start the copies of a row's keys `key` to `key + C` and their values, up to `end`."""
    shape, table = here.shape, here.table
    slot = slot_of(here, step)
    n = shape.copied
    block = [lax.div(key + i * n, shape.block_size) for i in range(shape.step // n)]
    last = table.shape[1] - 1
    ids = [table[row, jnp.minimum(b, last)] for b in block]  # loaded together, before the copies
    for pool, ring, arrived, free in here.rings:

        @pl.when(step >= shape.n_slots)
        def _():
            plgpu.barrier_wait(free.at[slot])

        for i, block_id in enumerate(ids):
            at = key + i * n
            inside = lax.rem(at, shape.block_size) if n < shape.block_size else 0

            @pl.when(at < end)
            def _():
                plgpu.copy_gmem_to_smem(
                    pool.at[block_id, head, pl.ds(inside, n)],
                    ring.at[slot, pl.ds(i * n, n)],
                    arrived.at[slot],
                )

            @pl.when(at >= end)
            def _():
                plgpu.barrier_arrive(arrived.at[slot])


def skip_slot(here: Block, step: Any) -> None:
    """Release a slot that the other warp group computes with."""
    slot = slot_of(here, step)
    for ring in here.rings:
        plgpu.barrier_wait(ring.arrived.at[slot])
        plgpu.barrier_arrive(ring.free.at[slot])


def see_all_freed(here: Block, step: Any) -> None:
    """Wait after the last step until no slot is in use: the barriers must not outlive the kernel."""
    for i in range(here.shape.n_slots):

        @pl.when(step > i)
        def _():
            slot = slot_of(here, step - 1 - i)
            for ring in here.rings:
                plgpu.barrier_wait(ring.free.at[slot])
