# pyright: reportAssignmentType=false
"""Latent attention over the blocks of the compressed cache in one launch of a Mosaic GPU kernel.

In the absorbed form (docs/latent-attention.md) all query heads attend to the one head in the cache: a token's
vector of D elements is its key, and the first C of them are its value. This is split attention
(`split_attention.py`) for such a cache, with the same ring, running softmax, work list and merge, but for
three things:

  - An entry is any token of any row, in prompts too, for up to 64 heads: they fill the matrix instruction, so
    a tile of several tokens would not read less.
  - Both computing warp groups visit every slot. Each computes all scores, and the sums of half of the values'
    columns: 64 x 512 sums in float32 would not fit in one group's registers. Computing the scores twice costs
    half as many operations again, and saves an exchange of weights at every slot.
  - A slot holds 64 keys, which are their own values. Queries and two slots fill shared memory, so results
    leave through the memory of the queries.
"""

from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from orca_jax.errors import ConfigError
from orca_jax.pallas.kernel_shape import BLOCK_SIZES, DTYPES, SHARED_BYTES, Q, checked_work
from orca_jax.pallas.merge import merge_rows
from orca_jax.pallas.mosaic_forms import (
    TILE_ROW,
    InterpretGPUParams,
    laid_out,
    plus_product,
    times_transposed,
)
from orca_jax.pallas.ring import fetch_item, n_steps, see_all_freed, slot_of
from orca_jax.pallas.running_softmax import (
    Carry,
    Mask,
    clear_past_end,
    nothing_yet,
    over_slots,
    reaches_past_end,
    weighed,
)
from orca_jax.pallas.staging import put_part, stage
from orca_jax.pallas.thread_block import CoreItem, Ring, entries
from orca_jax.pallas.work_list.bounds import Plan
from orca_jax.pallas.work_list.work_items import ITEM, never_cut

_SWIZZLED = 64  # elements that the widest swizzle keeps together
_KEYS = 64  # of a slot
_MOST_VALUES = 256  # columns of a warp group's sums


def unsupported(rank: int, width: int, block_size: int, dtype_name: str) -> str | None:
    """Why the kernel cannot run a model of these sizes (C, D), as a clause; None if it can."""
    if rank % (2 * _SWIZZLED) or not 0 < rank <= 2 * _MOST_VALUES:
        most, each = 2 * _MOST_VALUES, 2 * _SWIZZLED
        return f"its compressed vectors have {rank} elements; the kernel has multiples of {each} up to {most}"
    if width % _SWIZZLED or width < rank or (Q + 2 * _KEYS) * width * 2 > SHARED_BYTES:
        return f"its latent keys have {width} elements; the kernel has multiples of {_SWIZZLED} up to 576"
    if block_size not in BLOCK_SIZES:
        return f"its blocks have {block_size} slots; the kernel has {', '.join(map(str, BLOCK_SIZES))}"
    if dtype_name not in DTYPES:
        return f"its cache is {dtype_name}; the kernel has {', '.join(DTYPES)}"
    return None


def latent_plan(n_tokens: int, n_rows: int, n_heads: int, block_size: int, n_cores: int) -> Plan:
    """The bounds of the work list. Heads are in as few groups as can be, of a multiple of 8 up to 64 each."""
    n_groups = -(-n_heads // Q)
    group = -(-n_heads // (8 * n_groups)) * 8
    return Plan(n_tokens, n_rows, n_groups, group, block_size, n_cores, by_token=True)


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The static sizes of one compiled kernel."""

    rank: int  # C
    width: int  # D
    block_size: int
    scale: float
    plan: Plan
    interpret: bool
    soft_cap: None = None

    @property
    def step(self) -> int:
        """Keys in a slot of the ring."""
        return _KEYS

    @property
    def n_values(self) -> int:
        """Columns of the values, and so of the sums, of a warp group."""
        return self.rank // 2

    @property
    def copied(self) -> int:
        """Keys in one copy: a block or a part of one."""
        return self.plan.granule

    @property
    def n_slots(self) -> int:
        """Slots of the ring: as many as fit in shared memory beside the queries, at most 8."""
        row = 2 * self.width
        return min(2 if self.interpret else 8, (SHARED_BYTES - Q * row) // (_KEYS * row))


@dataclass(frozen=True, slots=True)
class LatentBlock:
    """A thread block of latent attention; arrays and barriers are references."""

    shape: LatentShape

    # In device memory. K groups of G heads.
    work: Any
    table: Any
    q: Any  # [T, K, G, D]
    cache: Any  # [n_blocks, 1, B, D]
    out: Any  # [T, K, G, C]
    part: Any  # [1, parts, G, C]
    part_top: Any  # [2, parts, G] from both warp groups, which have the same

    # In shared memory.
    q_s: Any  # [Q, D] swizzled; rows after the group's G hold anything
    staged: Any  # [2, Q, C / 2] results on their way out, in the memory of q_s
    top_s: Any  # [2, Q] float32
    keys_s: Any  # [S, keys, D] the ring, swizzled
    q_here: Any  # barriers: the queries have arrived
    keys_here: Any  # [S]
    keys_free: Any  # [S]
    met: Any  # both computing warp groups have come to the same point

    _: KW_ONLY
    core: Any
    group: Any

    @property
    def rings(self) -> tuple[Ring, ...]:
        """The one ring."""
        return (Ring(self.cache, self.keys_s, self.keys_here, self.keys_free),)

    @property
    def columns(self) -> Any:
        """This warp group's columns of the values."""
        return pl.ds(self.group * self.shape.n_values, self.shape.n_values)


def latent_attention(
    q: jax.Array,
    cache: jax.Array,
    block_table: jax.Array,
    row_start: jax.Array,
    kv_length: jax.Array,
    *,
    rank: int,
    scale: float,
    work: jax.Array | None = None,
    plan: Plan | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of each request's absorbed queries to its own compressed vectors.

    q [T, N, D] bfloat16 or float16; cache [n_blocks, 1, B, D] of the same dtype, where the first `rank` (C)
    elements of a key are its value; block_table [R, max_blocks], row_start [R + 1] and kv_length [R] int32:
    the queries of row r are the tokens row_start[r] to row_start[r + 1], the last positions of its
    kv_length[r]. Scores are multiplied by `scale`. Returns [T, N, C] of q's dtype, with zeros for tokens of
    no row.

    `plan` is `latent_plan` of these sizes, by default for a GPU of 132 cores (H100 SXM, H200). `work` is
    `work_items(row_start, kv_length, plan)`, which all layers share. If it is not given, the host makes it
    here, under a trace by a callback. `interpret` runs the kernel on the CPU.

    Raises ConfigError if shapes or dtypes do not fit each other, or if `unsupported` has a reason.
    """
    if q.ndim != 3 or cache.ndim != 4 or block_table.ndim != 2 or kv_length.ndim != 1:
        raise ConfigError(
            f"latent attention got q {q.shape}, cache {cache.shape}, block_table {block_table.shape} and "
            f"kv_length {kv_length.shape}; they must be [T, N, D], [n_blocks, 1, B, D], [R, max_blocks] and "
            "[R]"
        )
    n_tokens, n_heads, width = q.shape
    n_blocks, _, block_size, _ = cache.shape
    n_rows = len(kv_length)
    for name, array, shape, dtype in (
        ("cache", cache, (n_blocks, 1, block_size, width), q.dtype),
        ("block_table", block_table, (n_rows, *block_table.shape[1:]), jnp.int32),
        ("row_start", row_start, (n_rows + 1,), jnp.int32),
        ("kv_length", kv_length, (n_rows,), jnp.int32),
    ):
        if array.shape != shape or array.dtype != dtype or 0 in (*q.shape, *array.shape):
            raise ConfigError(
                f"{name} is {array.dtype.name} {array.shape}; with q {q.dtype.name} {q.shape} and kv_length "
                f"{kv_length.shape} it must be {jnp.dtype(dtype).name} {shape}, and nothing empty"
            )
    if reason := unsupported(rank, width, block_size, q.dtype.name):
        raise ConfigError(
            f"the latent-attention kernel does not support this model: {reason}; use the pure-JAX path"
        )
    plan = plan or latent_plan(n_tokens, n_rows, n_heads, block_size, 132)
    expected = latent_plan(n_tokens, n_rows, n_heads, block_size, plan.n_cores)
    if replace(plan, fixed_keys=0) != expected:
        raise ConfigError(f"{plan} does not fit these arguments; make it with latent_plan: {expected}")
    work = checked_work(work, row_start, kv_length, plan)
    n_padding = plan.n_heads - n_heads
    grouped = jnp.pad(q, ((0, 0), (0, n_padding), (0, 0))).reshape(
        n_tokens, plan.n_kv_heads, plan.group, width
    )
    shape = LatentShape(rank, width, block_size, scale, plan, interpret)
    out = _launch(shape, work, block_table, grouped, cache)
    return out.reshape(n_tokens, plan.n_heads, rank)[:, :n_heads]


@partial(jax.jit, static_argnames="shape")  # a model with many layers lowers the kernel once
def _launch(
    shape: LatentShape, work: jax.Array, block_table: jax.Array, q: jax.Array, cache: jax.Array
) -> jax.Array:
    plan, dtype = shape.plan, q.dtype
    n_tokens, n_groups, group, _ = q.shape
    swizzled = (plgpu.TilingTransform((8, _SWIZZLED)), plgpu.SwizzleTransform(2 * _SWIZZLED))
    tiles = [
        plgpu.SMEM((Q, shape.width), dtype, transforms=swizzled),
        plgpu.SMEM((2, Q, shape.n_values), dtype),
    ]
    copies = shape.step // shape.copied
    out, part, part_top = plgpu.kernel(
        partial(_kernel, shape),
        out_type=(
            jax.ShapeDtypeStruct((n_tokens, n_groups, group, shape.rank), dtype),
            jax.ShapeDtypeStruct((1, plan.n_parts, group, shape.rank), dtype),
            jax.ShapeDtypeStruct((2, plan.n_parts, group), jnp.float32),
        ),
        grid=(plan.n_cores,),
        grid_names=("core",),
        num_threads=3,
        thread_name="group",
        kernel_name="latent_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=1024,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=InterpretGPUParams() if shape.interpret else None,
        scratch_types=[
            tiles if shape.interpret else plgpu.RefUnion(*tiles),  # the interpreter cannot alias
            plgpu.SMEM((2, Q), jnp.float32),
            plgpu.SMEM((shape.n_slots, shape.step, shape.width), dtype, transforms=swizzled),
            plgpu.Barrier(num_arrivals=1),
            plgpu.Barrier(num_arrivals=copies, num_barriers=shape.n_slots),
            plgpu.Barrier(num_arrivals=2, num_barriers=shape.n_slots),
            plgpu.Barrier(num_arrivals=2),
        ],
    )(work, block_table, q, cache)
    if never_cut(block_table.shape[1] * shape.block_size) or not plan.cuts_rows:
        return out
    return merge_rows(out, part, part_top[0], work, plan, grouped_last=True)


def _kernel(shape: LatentShape, *references: Any) -> None:
    """The program of a thread block's three warp groups; the references are LatentBlock's fields."""
    arrays, (tiles_s, *scratch) = references[:7], references[7:]
    core, group = lax.axis_index("core"), lax.axis_index("group")
    here = LatentBlock(shape, *arrays, *tiles_s, *scratch, core=core, group=group)
    n_entries = entries(here).n

    @pl.when(group < 2)
    def _() -> None:
        plgpu.set_max_registers(240, action="increase")
        lax.fori_loop(0, n_entries, partial(_compute_entry, here), jnp.int32(0))

    @pl.when(group == 2)
    def _() -> None:
        plgpu.set_max_registers(24, action="decrease")

        def fetch(i: Any, step: Any) -> Any:
            return fetch_item(here, entries(here).item(i), 0, step)

        see_all_freed(here, lax.fori_loop(0, n_entries, fetch, jnp.int32(0)))


def _compute_entry(here: LatentBlock, i: Any, step: Any) -> Any:
    """Compute this warp group's columns of the core's entry i. Returns the next step."""
    item = entries(here).item(i)
    token, heads = here.work[item.record, ITEM.token], pl.ds(0, here.shape.plan.group)
    _meet(here)  # the results of the entry before have left the memory of the queries

    @pl.when(here.group == 0)
    def _() -> None:
        plgpu.copy_gmem_to_smem(here.q.at[token, item.head], here.q_s.at[heads], here.q_here)

    plgpu.barrier_wait(here.q_here)
    n = n_steps(here, item)
    carry = _attended(here, item, n, step)
    _, total, sums = carry
    _meet(here)  # neither warp group reads the queries any more
    stage(here, sums, total)
    rows = here.staged.at[here.group, heads]
    out = here.out.at[token, item.head, :, here.columns]
    pl.when(item.part < 0)(lambda: plgpu.copy_smem_to_gmem(rows, out))
    pl.when(item.part >= 0)(lambda: _put_part(here, carry, item.part))
    plgpu.wait_smem_to_gmem(0)
    return step + n


def _attended(here: LatentBlock, item: CoreItem, n: Any, step: Any) -> Carry:
    """Attend to all n slots of the item."""
    size, begin, end = here.shape.step, item.begin, item.end
    last_key = laid_out(jnp.full((Q,), end - 1, jnp.int32), TILE_ROW, interpret=here.shape.interpret)

    def slot(j: Any, carry: Carry, *, masked: bool) -> Carry:
        mask = Mask(begin + j * size, end, last_key, None) if masked else None
        return _attend(here, carry, step + j, mask)

    whole, part = partial(slot, masked=False), partial(slot, masked=True)
    return over_slots(whole, part, nothing_yet(here.shape), None, lax.div(end - begin, size), n)


def _attend(here: LatentBlock, carry: Carry, step: Any, mask: Mask | None) -> Carry:
    """Attend to a slot's keys, all of them or those of the mask."""
    shape, slot = here.shape, slot_of(here, step)
    plgpu.barrier_wait(here.keys_here.at[slot])
    scores = times_transposed(here.q_s, here.keys_s.at[slot], lambda: None, interpret=shape.interpret)
    (top, total, sums), weights = weighed(shape, carry, scores, mask, here.q_s.dtype)
    if mask is not None:

        def clear() -> None:
            _meet(here)  # the other warp group has read these columns as keys
            clear_past_end(here, here.keys_s, slot, mask, here.columns.start)

        pl.when(reaches_past_end(shape, mask))(clear)
    values = here.keys_s.at[slot, :, here.columns]
    sums = plus_product(sums, weights, values, interpret=shape.interpret)
    plgpu.barrier_arrive(here.keys_free.at[slot])
    return top, total, sums


def _meet(here: LatentBlock) -> None:
    """Wait until both computing warp groups are here."""
    plgpu.barrier_arrive(here.met)
    plgpu.barrier_wait(here.met)


def _put_part(here: LatentBlock, carry: Carry, part: Any) -> None:
    """Copy the staged rows to the arrays that `merge` reads."""
    n = here.shape.plan.group
    place = here.part.at[0, part, :, here.columns]
    put_part(here, carry, [place], here.part_top.at[here.group, part], n_rows=n, n_tops=n)
