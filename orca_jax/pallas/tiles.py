# ruff: noqa: B023 - `pl.when` runs what it is given at once
"""Items with several queries: up to 2 * Q query tokens of one row, one head.

Two warp groups take Q of the tokens each and share the keys. Tiles of padding see no key, and so get zeros.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from orca_jax.pallas.kernel_shape import C, Q
from orca_jax.pallas.mosaic_forms import TILE_ROW, laid_out
from orca_jax.pallas.ring import fetch, n_chunks
from orca_jax.pallas.running_softmax import attend, nothing_yet
from orca_jax.pallas.staging import load_queries, stage
from orca_jax.pallas.thread_block import ThreadBlock
from orca_jax.pallas.work_items import ENTRY, HEADER


def compute_tile(here: ThreadBlock, item: Any, step: Any) -> Any:
    """A computing warp group's half of a tile. Returns the step after it."""
    work, group = here.work, here.group
    record = HEADER + lax.div(item, here.shape.n_heads)
    head = lax.rem(item, here.shape.n_heads)
    token = work[record, ENTRY.token] + Q * group
    n = jnp.clip(work[record, ENTRY.n_queries] - Q * group, 0, Q)
    position = work[record, ENTRY.position] + Q * group
    end = work[record, ENTRY.end]
    load_queries(here, here.q.at[pl.ds(token, Q), head, here.columns])
    last_key = lax.broadcasted_iota(jnp.int32, (Q,), 0)
    last_key = laid_out(last_key, TILE_ROW, interpret=here.shape.interpret) + position
    n_steps = n_chunks(0, end)
    _, total, sums = lax.fori_loop(
        0,
        n_steps,
        lambda j, carry: attend(here, carry, step + j, j * C, end, last_key),
        nothing_yet(here.shape),
    )
    share = jnp.where(total > 0, 1 / total, 0.0)
    stage(here, sums, share)
    # Only so many rows are this row's, so copies of 64, 32, ... 1 rows, as the bits of n say.
    size = Q
    while size:
        at = n & ~(2 * size - 1)

        @pl.when(n & size != 0)
        def _():
            plgpu.copy_smem_to_gmem(
                here.staged.at[group, pl.ds(at, size)],
                here.out.at[pl.ds(token + at, size), head, here.columns],
            )

        size //= 2
    plgpu.wait_smem_to_gmem(0)
    return step + n_steps


def fetch_tile(here: ThreadBlock, item: Any, step: Any) -> Any:
    """Fetch the keys and values of a tile. Returns the step after it."""
    record = HEADER + lax.div(item, here.shape.n_heads)
    head = lax.div(lax.rem(item, here.shape.n_heads), here.shape.group)
    row, end = here.work[record, ENTRY.row], here.work[record, ENTRY.end]
    n_steps = n_chunks(0, end)
    pl.loop(0, n_steps)(lambda j: fetch(here, row, head, j * C, end, step + j))
    return step + n_steps
