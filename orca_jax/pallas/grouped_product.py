# pyright: reportAssignmentType=false
# ruff: noqa: B023 - `pl.when` calls the function at once
"""Products of experts in one launch of a Mosaic GPU kernel, which reads only experts that have rows.

The launch has one thread block for each core of the GPU, and the blocks take items
(`work_list/group_tiles.py`) in turn. Two warp groups of a block compute half of an item's columns each. A
third fetches weights and rows into a ring in shared memory, ahead of use and across items.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from orca_jax.errors import ConfigError
from orca_jax.pallas.mosaic_forms import InterpretGPUParams, put_transposed, sum_of_products
from orca_jax.pallas.work_list.group_tiles import (
    ALIGNED,
    COLUMNS,
    STEP,
    Item,
    ProductShape,
    cumulative,
    item_at,
    tile_table,
    unsupported,
)


def grouped_product(
    x: jax.Array, weight: jax.Array, sizes: jax.Array, *, n_cores: int = 132, interpret: bool = False
) -> jax.Array:
    """Multiply consecutive groups of rows of x [N, in] by one weight each of [X, out, in]: [N, out].

    Group i has `sizes[i]` rows, [X] int32; rows after the last group give zeros, whatever they hold. x and
    weight are both bfloat16 or both float16; sums are float32, the result has x's dtype. A row's result
    depends on the row and its weight alone. `n_cores` is the GPU's number of streaming multiprocessors;
    `interpret` runs the kernel on the CPU.

    Raises ConfigError if shapes do not fit each other, or if `unsupported` has a reason.
    """
    n_experts, n_out, n_in = weight.shape
    if x.ndim != 2 or x.shape[1] != n_in or sizes.shape != (n_experts,) or sizes.dtype != jnp.int32:
        raise ConfigError(
            f"a grouped product got x {x.shape}, weight {weight.shape} and sizes {sizes.dtype.name} "
            f"{sizes.shape}; they must be [N, in], [X, out, in] and int32 [X]"
        )
    if reason := unsupported(n_out, n_in, x.dtype.name, weight.dtype.name):
        raise ConfigError(
            f"the grouped kernel does not support this product: {reason}; use the pure-JAX path"
        )
    n_rows = x.shape[0]
    shape = ProductShape(-(-n_rows // ALIGNED) * ALIGNED, n_experts, n_out, n_in, n_cores, interpret)
    x = jnp.pad(x, ((0, shape.n_rows - n_rows), (0, 0)))
    out = _launch(shape, tile_table(sizes, shape), x, weight)[:n_rows]
    return jnp.where((jnp.arange(n_rows) < cumulative(sizes)[-1])[:, None], out, 0)


@partial(jax.jit, static_argnames="shape")  # a model with many layers lowers the kernel once
def _launch(shape: ProductShape, table: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
    rows, n_slots, width = shape.tile_rows, shape.n_slots, shape.swizzled
    swizzled = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width))
    # Copies of whole tiles reach past the last row and column. The hardware fills in zeros, the interpreter
    # does not.
    if shape.interpret:
        x = jnp.pad(x, ((0, rows), (0, STEP)))
        weight = jnp.pad(weight, ((0, 0), (0, COLUMNS), (0, STEP)))
    return plgpu.kernel(
        partial(_kernel, shape),
        out_type=jax.ShapeDtypeStruct((shape.n_rows, shape.n_out), x.dtype),
        grid=(shape.n_cores,),
        grid_names=("core",),
        num_threads=3,
        thread_name="group",
        kernel_name="grouped_product",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=InterpretGPUParams() if shape.interpret else None,
        scratch_types=[
            plgpu.SMEM((n_slots, 2 * COLUMNS, STEP), x.dtype, transforms=swizzled),
            plgpu.SMEM((n_slots, rows, STEP), x.dtype, transforms=swizzled),
            plgpu.SMEM((2, rows, COLUMNS), x.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=n_slots),
            plgpu.Barrier(num_arrivals=2, num_barriers=n_slots),
        ],
    )(table, x, weight)


def _kernel(shape: ProductShape, table: Any, x: Any, weight: Any, out: Any, *shared: Any) -> None:
    """The program of a thread block's three warp groups."""
    weight_s, x_s, out_s, arrived, freed = shared
    core, group = lax.axis_index("core"), lax.axis_index("group")
    n_items = lax.div(table[0, 0] * shape.column_tiles - core + (shape.n_cores - 1), shape.n_cores)

    def each_item(run: Any) -> None:
        pl.loop(0, n_items)(lambda i: run(item_at(table, core + i * shape.n_cores, shape), i * shape.n_steps))

    def fetch(item: Item, first_step: Any) -> None:
        @pl.loop(0, shape.n_steps)
        def _(j: Any) -> None:
            step = first_step + j
            slot, part = lax.rem(step, shape.n_slots), pl.ds(j * STEP, STEP)
            pl.when(step >= shape.n_slots)(lambda: plgpu.barrier_wait(freed.at[slot]))
            columns, rows = pl.ds(item.column, 2 * COLUMNS), pl.ds(item.row, shape.tile_rows)
            plgpu.copy_gmem_to_smem(
                weight.at[item.expert, columns, part], weight_s.at[slot], arrived.at[slot]
            )
            plgpu.copy_gmem_to_smem(x.at[rows, part], x_s.at[slot], arrived.at[slot])

    def compute(item: Item, first_step: Any) -> None:
        def arrive(j: Any) -> tuple[Any, Any]:
            slot = lax.rem(first_step + j, shape.n_slots)
            plgpu.barrier_wait(arrived.at[slot])
            return weight_s.at[slot, pl.ds(group * COLUMNS, COLUMNS)], x_s.at[slot]

        def done(j: Any) -> None:
            plgpu.barrier_arrive(freed.at[lax.rem(first_step + j, shape.n_slots)])

        tile = (COLUMNS, shape.tile_rows)
        sums = sum_of_products(tile, shape.n_steps, arrive, done, interpret=shape.interpret)
        put_transposed(out_s, group, sums.astype(out_s.dtype), interpret=shape.interpret)
        plgpu.commit_smem()
        column = item.column + group * COLUMNS
        pl.when(column < shape.n_out)(lambda: put_rows(item, column))
        plgpu.wait_smem_to_gmem(0)

    def put_rows(item: Item, column: Any) -> None:
        # Adjacent rows belong to other experts, so copies have 128, 64, ... 1 rows, by the bits of n_rows.
        size = shape.tile_rows
        while size:
            at = item.n_rows & ~(2 * size - 1)

            @pl.when(item.n_rows & size != 0)
            def _() -> None:
                plgpu.copy_smem_to_gmem(
                    out_s.at[group, pl.ds(item.first + at, size)],
                    out.at[pl.ds(item.row + item.first + at, size), pl.ds(column, COLUMNS)],
                )

            size //= 2

    @pl.when(group < 2)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        each_item(compute)

    @pl.when(group == 2)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")
        each_item(fetch)
        n_all = n_items * shape.n_steps
        for i in range(shape.n_slots):  # the barriers must not outlive the kernel

            @pl.when(n_all > i)
            def _() -> None:
                plgpu.barrier_wait(freed.at[lax.rem(n_all - 1 - i, shape.n_slots)])
