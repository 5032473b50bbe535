"""Split attention over the K/V blocks in one launch of a Mosaic GPU kernel (ORCA 3.2, section 5).

Every request of an iteration, whatever its phase and length, is cut into items, and the thread blocks of one
launch, as many as the chip has cores, take them in turn. An item is either

  - a tile (`tiles.py`): up to 2 * Q query tokens of one row, one head; or
  - a pair of pieces (`pieces.py`), each the query of an increment-phase row, all heads of one key/value head,
    over a range of its keys. Long contexts are several pieces, so that a small batch fills the chip; `merge`
    adds their results.

Two warp groups of a thread block compute; a third fetches keys and values into a ring (`ring.py`) in shared
memory, ahead of use and across items.

Letters as in `orca_jax/model/__init__.py`, and here Q query rows of a warp group's tile (64, the height of
Hopper's matrix instruction), C keys of a slot, G = N / K heads of a group.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from orca_jax.pallas.arguments import check_work, kernel_shape
from orca_jax.pallas.kernel_shape import KernelShape, Q
from orca_jax.pallas.merge import merge
from orca_jax.pallas.mosaic_forms import InterpretGPUParams
from orca_jax.pallas.pieces import compute_pieces, fetch_pieces
from orca_jax.pallas.ring import see_all_freed
from orca_jax.pallas.thread_block import ThreadBlock, scratch_types
from orca_jax.pallas.tiles import compute_tile, fetch_tile
from orca_jax.pallas.work_items import Plan, work_items


def split_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_table: jax.Array,
    row_start: jax.Array,
    kv_length: jax.Array,
    *,
    scale: float | None = None,
    work: jax.Array | None = None,
    plan: Plan | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of each request's query tokens to its own keys (ORCA 3.2).

    q [T, N, D] bfloat16 or float16; k_cache, v_cache [n_blocks, K, B, D] of the same dtype; block_table
    [R, max_blocks], row_start [R + 1] and kv_length [R] int32: the queries of row r are the tokens
    row_start[r] to row_start[r + 1], the last positions of its kv_length[r]. `scale` is D ** -0.5 unless
    given. Returns [T, N, D] of q's dtype, with zeros for tokens that belong to no row.

    `plan` bounds the list of work; unless given it is that of a chip of 132 cores (H100 SXM, H200). `work` is
    `work_items(row_start, kv_length, plan)`, made here unless given: who calls this for every layer makes it
    once per iteration, on the host. `interpret` runs the kernel on the CPU.

    Raises ConfigError where shapes or dtypes do not fit each other, or `unsupported` has a reason.
    """
    shape = kernel_shape(
        q, k_cache, v_cache, block_table, row_start, kv_length, scale=scale, plan=plan, interpret=interpret
    )
    work = work_items(row_start, kv_length, shape.plan) if work is None else work
    check_work(work, shape.plan)
    return _launch(shape, work, block_table, q, k_cache, v_cache)


@partial(jax.jit, static_argnames="shape")  # so that a model of many layers lowers the kernel once
def _launch(
    shape: KernelShape,
    work: jax.Array,
    block_table: jax.Array,
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
) -> jax.Array:
    plan, n_parts, n_kv_heads, group = shape.plan, shape.n_parts, shape.n_kv_heads, shape.group
    n_entries = plan.max_entries
    result = jax.ShapeDtypeStruct(q.shape, q.dtype)
    part = jax.ShapeDtypeStruct((n_parts, n_entries * n_kv_heads, group, shape.head_size), q.dtype)
    part_top = jax.ShapeDtypeStruct((n_entries * n_kv_heads, plan.padded_group), jnp.float32)
    # Copies of whole tiles reach past the last token; hardware gives zeros there, the interpreter does not.
    if shape.interpret:
        q = jnp.pad(q, ((0, 2 * Q), (0, plan.padded_group), (0, 0)))
    out, part, part_top = plgpu.kernel(
        partial(_kernel, shape),
        out_type=(result, part, part_top),
        grid=(plan.n_cores,),
        grid_names=("core",),
        num_threads=3,
        thread_name="group",
        kernel_name="split_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=1024,
            lowering_semantics=plgpu.LoweringSemantics.Lane,  # jax 0.11 would else infer layouts; 0.10 cannot
        ),
        interpret=InterpretGPUParams() if shape.interpret else None,
        scratch_types=scratch_types(shape, q.dtype),
    )(work, block_table, q, k_cache, v_cache)
    if block_table.shape[1] * shape.block_size <= plan.split_above:
        return out  # no row is long enough to be split
    part = part.reshape(n_parts, n_entries, n_kv_heads, group, shape.head_size)
    return merge(out, part, part_top.reshape(n_entries, n_kv_heads, -1), work, plan)


def _kernel(shape: KernelShape, work: Any, *references: Any) -> None:
    """What each of a thread block's three warp groups does; the references are those of ThreadBlock."""
    *arrays, tiles = references[:8]
    core, group = lax.axis_index("core"), lax.axis_index("group")
    here = ThreadBlock(
        *(shape, work, *arrays, *tiles, *references[8:]),
        core=core,
        group=group,
        n_tile_items=work[0, 0] * shape.n_heads,
        n_pieces=work[0, 1] * shape.n_kv_heads,
        columns=pl.ds(core * 0, shape.staged_size),
    )
    n_items = here.n_tile_items + lax.div(here.n_pieces + 1, 2)

    def all_items(on_tile: Any, on_pieces: Any) -> Any:
        """Every item whose turn is this thread block's; returns the steps that were taken."""

        def one(i, step):
            item = core + i * shape.plan.n_cores
            return lax.cond(
                item < here.n_tile_items, partial(on_tile, here), partial(on_pieces, here), item, step
            )

        mine = lax.div(jnp.maximum(n_items - core, 0) + (shape.plan.n_cores - 1), shape.plan.n_cores)
        return lax.fori_loop(0, mine, one, jnp.int32(0))

    @pl.when(group < 2)
    def _():
        plgpu.set_max_registers(240, action="increase")
        all_items(compute_tile, compute_pieces)

    @pl.when(group == 2)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        see_all_freed(here, all_items(fetch_tile, fetch_pieces))
