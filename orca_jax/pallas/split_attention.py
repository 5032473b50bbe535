"""Split attention over the K/V blocks in one launch of a Mosaic GPU kernel (ORCA 3.2, section 5).

An iteration mixes requests of both phases and of very different lengths: a decode row has one query and
perhaps 100,000 keys, a prefill row has a thousand queries. One grid over rows would leave most of the GPU
idle while the longest row ends, and a launch for each phase would leave gaps between. So the host divides
the work of the whole batch before the launch: the grid has one thread block for each core of the GPU, and
each block has a list of items of about equal total length (`work_list/work_items.py`). An item is either

  - a tile (`tiles.py`): several query tokens of one row, for up to 8 heads of one key/value head, 2 * Q query
    rows in all; or
  - an entry (`entries.py`): the query of a decode row, for all heads of one key/value head.

An item covers all keys that its queries see, or a range of them: where whole items would load some cores much
more than others, items are split, and `merge` combines the results of their parts by their softmax sums.

Two warp groups of a thread block compute. A third fetches keys and values into a ring (`ring.py`) in shared
memory, ahead of use and across items, so that memory is read without pause from the first item to the last.
A launch's shapes depend on the bucket alone; the list is an argument, so nothing is compiled anew.

With `Plan.fixed` rows are split at fixed positions, and a row's result is the same to the bit in any batch.

Letters as in `orca_jax/model/__init__.py`, and Q query rows of a warp group's tile (64, the height of
Hopper's matrix instruction), C keys of a slot, G = N / K query heads of a key/value head.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from orca_jax.pallas.entries import compute_entry, fetch_entry
from orca_jax.pallas.kernel_shape import KernelShape, Q, checked_work, kernel_shape
from orca_jax.pallas.merge import merge_rows, merge_tiles
from orca_jax.pallas.mosaic_forms import InterpretGPUParams
from orca_jax.pallas.ring import see_all_freed
from orca_jax.pallas.thread_block import ThreadBlock, entries, scratch_types, tiles
from orca_jax.pallas.tiles import compute_tile, fetch_tile
from orca_jax.pallas.work_list.bounds import TILE, Plan
from orca_jax.pallas.work_list.work_items import never_cut


def split_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_table: jax.Array,
    row_start: jax.Array,
    kv_length: jax.Array,
    *,
    group: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    work: jax.Array | None = None,
    plan: Plan | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of each request's query tokens to its own keys (ORCA 3.2).

    q [T, n, K, D] bfloat16 or float16: its first `group` slices (G; by default all n) are the queries, so a
    fused product of queries, keys and values is read in place. Query head [g, k] uses key/value head k.
    k_cache, v_cache [n_blocks, K, B, D] of the same dtype; block_table [R, max_blocks], row_start [R + 1] and
    kv_length [R] int32: the queries of row r are the tokens row_start[r] to row_start[r + 1], the last
    positions of its kv_length[r].

    Scores are multiplied by `scale`, by default D ** -0.5. With `soft_cap` c a score s becomes c * tanh(s /
    c), with an error below 1e-6 c. With `window` a query sees its own position and the window - 1 before it;
    blocks outside the windows of all of a row's queries are not read. Returns [T, G, K, D] of q's dtype, with
    zeros for tokens of no row.

    `plan` has the bounds of the work list and the same window; the default is for a GPU of 132 cores (H100
    SXM, H200). `work` is `work_items(row_start, kv_length, plan)`, which several layers can share. If it is
    not given, the host makes it here, under a trace by a callback. `interpret` runs the kernel on the CPU.

    Raises ConfigError if shapes or dtypes do not fit each other, or if `unsupported` has a reason.
    """
    shape = kernel_shape(
        q,
        k_cache,
        v_cache,
        block_table,
        row_start,
        kv_length,
        group=group if plan is None or group is not None else plan.group,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        plan=plan,
        interpret=interpret,
    )
    return _launch(
        shape, checked_work(work, row_start, kv_length, shape.plan), block_table, q, k_cache, v_cache
    )


@partial(jax.jit, static_argnames="shape")  # a model with many layers lowers the kernel once
def _launch(
    shape: KernelShape,
    work: jax.Array,
    block_table: jax.Array,
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
) -> jax.Array:
    plan, n_rounded = shape.plan, shape.n_rounded
    out_shape = (shape.n_tokens, shape.group, shape.n_kv_heads, shape.head_size)
    result = jax.ShapeDtypeStruct(out_shape, q.dtype)
    parts = [
        jax.ShapeDtypeStruct((n_rounded, plan.n_parts, shape.group, shape.head_size), q.dtype),
        jax.ShapeDtypeStruct((plan.n_parts, shape.padded_group), jnp.float32),
    ]
    if plan.cuts_tiles:
        parts += [
            jax.ShapeDtypeStruct((n_rounded, plan.n_tile_parts, TILE, shape.head_size), q.dtype),
            jax.ShapeDtypeStruct((plan.n_tile_parts, TILE), jnp.float32),
        ]
    # Copies of whole tiles reach past the last token and head. The hardware fills in zeros, the interpreter
    # does not.
    if shape.interpret:
        q = jnp.pad(q, ((0, 2 * Q), (0, shape.padded_group), (0, 0), (0, 0)))
    out, part, part_top, *of_tiles = plgpu.kernel(
        partial(_kernel, shape),
        out_type=(result, *parts),
        grid=(plan.n_cores,),
        grid_names=("core",),
        num_threads=3,
        thread_name="group",
        kernel_name="split_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=1024,
            lowering_semantics=plgpu.LoweringSemantics.Lane,  # jax 0.11 would infer layouts; 0.10 cannot
        ),
        interpret=InterpretGPUParams() if shape.interpret else None,
        scratch_types=scratch_types(shape, q.dtype),
    )(work, block_table, q, k_cache, v_cache)
    if never_cut(block_table.shape[1] * shape.block_size) or not plan.cuts_rows:
        return out
    out = merge_rows(out, part, part_top, work, plan)
    return merge_tiles(out, of_tiles[0], of_tiles[1], work, plan) if of_tiles else out


def _kernel(shape: KernelShape, work: Any, *references: Any) -> None:
    """The program of a thread block's three warp groups; the references are ThreadBlock's fields."""
    n_arrays = 9 if shape.plan.cuts_tiles else 7
    arrays, (tiles_s, *scratch) = references[:n_arrays], references[n_arrays:]
    no_tile_parts: list[Any] = [] if shape.plan.cuts_tiles else [None, None]
    core, group = lax.axis_index("core"), lax.axis_index("group")
    here = ThreadBlock(*(shape, work, *arrays, *no_tile_parts, *tiles_s, *scratch), core=core, group=group)
    n_tiles, n_entries = tiles(here).n, entries(here).n
    # Half of the cores begin with entries, so that memory-bound work runs next to matrix-bound work.
    tiles_first = lax.rem(core, 2) == 0

    def all_items(on_tile: Any, on_entry: Any) -> Any:
        """Run every item of this core. Returns the number of steps."""

        def run_item(i: Any, step: Any) -> Any:
            i_tile = jnp.where(tiles_first, i, i - n_entries)
            i_entry = jnp.where(tiles_first, i - n_tiles, i)
            is_tile = jnp.where(tiles_first, i_tile < n_tiles, i_entry >= n_entries)
            return lax.cond(
                is_tile,
                lambda step: on_tile(here, i_tile, step),
                lambda step: on_entry(here, i_entry, step),
                step,
            )

        return lax.fori_loop(0, n_tiles + n_entries, run_item, jnp.int32(0))

    @pl.when(group < 2)
    def _():
        plgpu.set_max_registers(240, action="increase")
        all_items(compute_tile, compute_entry)

    @pl.when(group == 2)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        see_all_freed(here, all_items(fetch_tile, fetch_entry))
