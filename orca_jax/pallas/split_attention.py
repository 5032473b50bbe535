# pyright: reportArgumentType=false, reportAssignmentType=false, reportPrivateImportUsage=false
"""Split attention over the K/V blocks in one launch of a Mosaic GPU kernel (ORCA 3.2, section 5).

Every request of an iteration, whatever its phase and length, is cut into items, and the thread blocks of one
launch, as many as the chip has cores, take them in turn. An item is either

  - a tile: up to 2 * Q query tokens of one row, one head; two warp groups take Q of them each and share the
    keys; or
  - a pair of pieces: the query of an increment-phase row, all N / K heads of one key/value head packed in one
    tile, over a range of its keys; each of two warp groups takes one piece with keys of its own. Long
    contexts are several pieces, so that a small batch fills the chip; `merge` adds their results.

A third warp group fetches the blocks of keys and values into a ring of slots in shared memory, ahead of use
and across items. The softmax is a running one, in registers, float32.

Letters as in `orca_jax/model/__init__.py`, and here Q query rows of a warp group's tile (64, the height of
Hopper's matrix instruction), C keys of a slot, G = N / K heads of a group, W the numbers of a work record.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from orca_jax.pallas.arguments import check_work, kernel_shape
from orca_jax.pallas.kernel_shape import C, KernelShape, Q, swizzle_bytes
from orca_jax.pallas.merge import merge
from orca_jax.pallas.mosaic_forms import (
    TILE,
    TILE_ROW,
    InterpretGPUParams,
    along_rows,
    iota,
    laid_out,
    load_plain,
    plus_product,
    times_transposed,
)
from orca_jax.pallas.work_items import ENTRY, HEADER, Plan, work_items

_NOTHING = -1e30  # the score of a key that is not there; finite, so that no inf - inf arises
_LOG2_E = math.log2(math.e)


def _kernel(shape: KernelShape, work, table, q, k_cache, v_cache, out, part, part_top, *scratch) -> None:
    """One thread block of three warp groups: two that compute and one that fetches."""
    tiles, top_s, k_s, v_s, q_here, k_here, v_here, k_free, v_free = scratch
    q_s, staged = tiles
    core, group = lax.axis_index("core"), lax.axis_index("group")
    plan, n_heads, n_kv = shape.plan, shape.n_heads, shape.n_kv_heads
    interpret = shape.interpret
    n_tile_items = work[0, 0] * n_heads
    n_pieces = work[0, 1] * n_kv
    n_items = n_tile_items + lax.div(n_pieces + 1, 2)

    def piece(item, w):
        """What warp group w has of a pair of pieces: record, key/value head, first key, end of keys."""
        index = 2 * (item - n_tile_items) + w
        there = index < n_pieces
        index = jnp.where(there, index, 0)
        record = plan.first_entry + lax.div(index, n_kv)
        begin = work[record, ENTRY.begin]
        return record, lax.rem(index, n_kv), begin, jnp.where(there, work[record, ENTRY.end], begin)

    def n_chunks(begin, end):
        return lax.div(end - begin + (C - 1), C)

    def fetch(row, head, key, end, step):
        """Ask for the keys `key` to `key + C` of a row and their values, as far as they are before `end`."""
        slot = lax.rem(step, shape.n_slots)
        n = shape.copied
        block = [lax.div(key + i * n, shape.block_size) for i in range(C // n)]
        last = table.shape[1] - 1
        ids = [table[row, jnp.minimum(b, last)] for b in block]  # asked for together, ahead of the copies
        for pool, ring, here, free in ((k_cache, k_s, k_here, k_free), (v_cache, v_s, v_here, v_free)):

            @pl.when(step >= shape.n_slots)
            def _():
                plgpu.barrier_wait(free.at[slot])

            for i in range(C // n):
                at = key + i * n
                inside = lax.rem(at, shape.block_size) if n < shape.block_size else 0

                @pl.when(at < end)
                def _():
                    plgpu.copy_gmem_to_smem(
                        pool.at[ids[i], head, pl.ds(inside, n)], ring.at[slot, pl.ds(i * n, n)], here.at[slot]
                    )

                @pl.when(at >= end)
                def _():
                    plgpu.barrier_arrive(here.at[slot])

    def attend(carry, step, key, end, last_key):
        """Take in a slot, keys `key` to `key + C`; each query row sees keys up to its last_key [Q]."""
        top, total, sums = carry
        slot = lax.rem(step, shape.n_slots)
        plgpu.barrier_wait(k_here.at[slot])
        scores = times_transposed(q_s.at[group], k_s.at[slot], interpret=interpret)  # [Q, C]
        plgpu.barrier_arrive(k_free.at[slot])
        keys = iota(Q, C, 1, interpret=interpret) + key
        scores = jnp.where(keys <= along_rows(last_key, (Q, C)), scores, _NOTHING)
        c = shape.scale * _LOG2_E
        new_top = jnp.maximum(top, scores.max(axis=1) * c)
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores * c - along_rows(new_top, (Q, C)))
        total = total * shrink + weights.sum(axis=1)
        sums = sums * along_rows(shrink, sums.shape)
        plgpu.barrier_wait(v_here.at[slot])

        @pl.when(key + C > end)
        def _():
            # What others left in the slots behind the row's own may be inf or NaN, and 0 * NaN is NaN.
            width = swizzle_bytes(shape.head_size) // 2
            for column in range(0, shape.head_size, width):  # a few registers at a time
                values = v_s.at[slot, :, pl.ds(column, width)]
                row = iota(C, width, 0, interpret=interpret) + key
                values[...] = jnp.where(row < end, values[...], jnp.zeros(values.shape, values.dtype))
            plgpu.commit_smem()

        sums = plus_product(sums, weights.astype(q_s.dtype), v_s.at[slot], interpret=interpret)
        plgpu.barrier_arrive(v_free.at[slot])
        return new_top, total, sums

    def pass_over(step):
        """Let a slot that belongs to the other warp group go by."""
        slot = lax.rem(step, shape.n_slots)
        plgpu.barrier_wait(k_here.at[slot])
        plgpu.barrier_arrive(k_free.at[slot])
        plgpu.barrier_wait(v_here.at[slot])
        plgpu.barrier_arrive(v_free.at[slot])

    def nothing_yet():
        return (
            laid_out(jnp.full((Q,), _NOTHING, jnp.float32), TILE_ROW, interpret=interpret),
            laid_out(jnp.zeros((Q,), jnp.float32), TILE_ROW, interpret=interpret),
            laid_out(jnp.zeros((Q, shape.head_size), jnp.float32), TILE, interpret=interpret),
        )

    columns = pl.ds(core * 0, shape.staged_size)  # a start known only at run time may pass the array's end

    def load_queries(source):
        """Bring query rows to where the matrix instruction wants them; `source` has Q rows or fewer."""
        buffer = staged.at[group, pl.ds(0, source.shape[0])]
        plgpu.copy_gmem_to_smem(source, buffer, q_here.at[group])
        plgpu.barrier_wait(q_here.at[group])
        q_s[group] = load_plain(staged, (group, slice(None), pl.ds(0, shape.head_size)), interpret=interpret)
        plgpu.commit_smem()

    def stage(x, share, *, rest: bool = False):
        """Put x [Q, D] times share [Q] into the buffer for results, or what rounding takes away from it."""
        width = swizzle_bytes(shape.head_size) // 2
        for column in range(0, shape.head_size, width):  # a few registers at a time
            exact = lax.slice(x, (0, column), (Q, column + width)) * along_rows(share, (Q, width))
            rounded = exact.astype(staged.dtype)
            if rest:
                rounded = (exact - rounded.astype(jnp.float32)).astype(staged.dtype)
            staged[group, :, pl.ds(column, width)] = rounded
        plgpu.commit_smem()

    def compute_tile(item, step):
        record = HEADER + lax.div(item, n_heads)
        head = lax.rem(item, n_heads)
        token = work[record, ENTRY.token] + Q * group
        n = jnp.clip(work[record, ENTRY.n_queries] - Q * group, 0, Q)
        position = work[record, ENTRY.position] + Q * group
        end = work[record, ENTRY.end]
        load_queries(q.at[pl.ds(token, Q), head, columns])
        last_key = lax.broadcasted_iota(jnp.int32, (Q,), 0)
        last_key = laid_out(last_key, TILE_ROW, interpret=interpret) + position
        n_steps = n_chunks(0, end)
        _, total, sums = lax.fori_loop(
            0, n_steps, lambda j, carry: attend(carry, step + j, j * C, end, last_key), nothing_yet()
        )
        share = jnp.where(total > 0, 1 / total, 0.0)
        stage(sums, share)
        # Only so many rows are this row's, so copies of 64, 32, ... 1 rows, as the bits of n say.
        size = Q
        while size:
            at = n & ~(2 * size - 1)

            @pl.when(n & size != 0)
            def _():
                plgpu.copy_smem_to_gmem(
                    staged.at[group, pl.ds(at, size)], out.at[pl.ds(token + at, size), head, columns]
                )

            size //= 2
        plgpu.wait_smem_to_gmem(0)
        return step + n_steps

    def compute_piece(item, step):
        record, head, begin, end = piece(item, group)
        *_, begin_0, end_0 = piece(item, 0)
        *_, begin_1, end_1 = piece(item, 1)
        n_each = jnp.maximum(n_chunks(begin_0, end_0), n_chunks(begin_1, end_1))
        token, slot = work[record, ENTRY.token], work[record, ENTRY.slot]
        n_rows = plan.padded_group
        load_queries(q.at[token, pl.ds(head * shape.group, n_rows), columns])
        last_key = laid_out(jnp.full((Q,), end - 1, jnp.int32), TILE_ROW, interpret=interpret)
        n_mine = n_chunks(begin, end)

        def chunk(j, carry):
            pl.when(group == 1)(lambda: pass_over(step + 2 * j))
            carry = attend(carry, step + 2 * j + group, begin + j * C, end, last_key)
            pl.when(group == 0)(lambda: pass_over(step + 2 * j + 1))
            return carry

        top, total, sums = lax.fori_loop(0, n_mine, chunk, nothing_yet())

        @pl.loop(2 * n_mine, 2 * n_each)
        def _(j):
            pass_over(step + j)

        group_rows = pl.ds(0, shape.group)
        stage(sums, 1 / total)

        @pl.when((n_mine > 0) & (slot < 0))
        def _():
            plgpu.copy_smem_to_gmem(
                staged.at[group, group_rows],
                out.at[token, pl.ds(head * shape.group, shape.group), columns],
            )
            plgpu.wait_smem_to_gmem(0)

        @pl.when((n_mine > 0) & (slot >= 0))
        def _():
            at = slot * n_kv + head
            plgpu.copy_smem_to_gmem(staged.at[group, group_rows], part.at[0, at, :, columns])
            top_s[group] = top + jnp.log2(total)
            if shape.n_parts == 2:
                plgpu.wait_smem_to_gmem(0)
                stage(sums, 1 / total, rest=True)
                plgpu.copy_smem_to_gmem(staged.at[group, group_rows], part.at[1, at, :, columns])
            plgpu.copy_smem_to_gmem(top_s.at[group, pl.ds(0, n_rows)], part_top.at[at])
            plgpu.wait_smem_to_gmem(0)

        return step + 2 * n_each

    def fetch_tile(item, step):
        record = HEADER + lax.div(item, n_heads)
        head = lax.div(lax.rem(item, n_heads), shape.group)
        row, end = work[record, ENTRY.row], work[record, ENTRY.end]
        n_steps = n_chunks(0, end)
        pl.loop(0, n_steps)(lambda j: fetch(row, head, j * C, end, step + j))
        return step + n_steps

    def fetch_pieces(item, step):
        record_0, head_0, begin_0, end_0 = piece(item, 0)
        record_1, head_1, begin_1, end_1 = piece(item, 1)
        row_0, row_1 = work[record_0, ENTRY.row], work[record_1, ENTRY.row]
        n_each = jnp.maximum(n_chunks(begin_0, end_0), n_chunks(begin_1, end_1))

        @pl.loop(0, n_each)
        def _(j):
            fetch(row_0, head_0, begin_0 + j * C, end_0, step + 2 * j)
            fetch(row_1, head_1, begin_1 + j * C, end_1, step + 2 * j + 1)

        return step + 2 * n_each

    def all_items(on_tile, on_pieces):
        def one(i, step):
            item = core + i * plan.n_cores
            return lax.cond(item < n_tile_items, on_tile, on_pieces, item, step)

        mine = lax.div(jnp.maximum(n_items - core, 0) + (plan.n_cores - 1), plan.n_cores)
        return lax.fori_loop(0, mine, one, jnp.int32(0))

    @pl.when(group < 2)
    def _():
        plgpu.set_max_registers(240, action="increase")
        all_items(compute_tile, compute_piece)

    @pl.when(group == 2)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        step = all_items(fetch_tile, fetch_pieces)
        for i in range(shape.n_slots):  # see every slot freed: the barriers end with the kernel

            @pl.when(step > i)
            def _():
                slot = lax.rem(step - 1 - i, shape.n_slots)
                plgpu.barrier_wait(k_free.at[slot])
                plgpu.barrier_wait(v_free.at[slot])


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
    n_tokens, n_heads, head_size = q.shape
    plan, n_kv_heads, group = shape.plan, shape.n_kv_heads, shape.group
    swizzle = swizzle_bytes(head_size)
    work = work_items(row_start, kv_length, plan) if work is None else work
    check_work(work, plan)
    # Copies of whole tiles reach past the last token; hardware gives zeros there, the interpreter does not.
    if interpret:
        q = jnp.pad(q, ((0, 2 * Q), (0, plan.padded_group), (0, 0)))
    shuffled = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    dtype = q.dtype
    copies = C // shape.copied
    tiles = [
        plgpu.SMEM((2, Q, head_size), dtype, transforms=shuffled),
        plgpu.SMEM((2, Q, shape.staged_size), dtype),
    ]
    n_slots = shape.n_slots
    out, part, part_top = plgpu.kernel(
        partial(_kernel, shape),
        out_type=(
            jax.ShapeDtypeStruct((n_tokens, n_heads, head_size), dtype),
            jax.ShapeDtypeStruct((shape.n_parts, plan.max_entries * n_kv_heads, group, head_size), dtype),
            jax.ShapeDtypeStruct((plan.max_entries * n_kv_heads, plan.padded_group), jnp.float32),
        ),
        grid=(plan.n_cores,),
        grid_names=("core",),
        num_threads=3,
        thread_name="group",
        kernel_name="split_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
        interpret=InterpretGPUParams() if interpret else None,
        scratch_types=[
            plgpu.RefUnion(*tiles) if shape.aliased else tiles,
            plgpu.SMEM((2, Q), jnp.float32),
            plgpu.SMEM((n_slots, C, head_size), dtype, transforms=shuffled),
            plgpu.SMEM((n_slots, C, head_size), dtype, transforms=shuffled),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_arrivals=copies, num_barriers=n_slots),
            plgpu.Barrier(num_arrivals=copies, num_barriers=n_slots),
            plgpu.Barrier(num_arrivals=2, num_barriers=n_slots),
            plgpu.Barrier(num_arrivals=2, num_barriers=n_slots),
        ],
    )(work, block_table, q, k_cache, v_cache)
    if block_table.shape[1] * shape.block_size <= plan.split_above:
        return out
    by_entry = (plan.max_entries, n_kv_heads)
    part = part.reshape(shape.n_parts, *by_entry, group, head_size)
    return merge(out, part, part_top.reshape(*by_entry, -1), work, plan)
