# pyright: reportPrivateImportUsage=false
"""Mosaic GPU operations, each with a plain form for jax 0.10's interpreter.

The interpreter lacks the operation, or runs the plain form faster. `interpret` is static: a compiled kernel
contains no plain form. Q queries, C keys, D head size.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import params
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# A public name since jax 0.11, before that one of the interpreter's module.
InterpretGPUParams: Any = getattr(plgpu, "InterpretGPUParams", None) or params.InterpretGPUParams

# `load` in jax 0.10 requires an index; jax 0.11 warns about it.
_ALL: tuple[Any, ...] = ((),) if jax.__version_info__ < (0, 11) else ()

TILE = plgpu.Layout.WGMMA  # how a warp group holds a [64, n] product in its registers
TILE_ROW = plgpu.Layout.WGMMA.reduce(1)  # one number for each row of such a product


def laid_out(x: jax.Array, layout: Any, *, interpret: bool) -> jax.Array:
    """`x` in registers in `layout`."""
    return x if interpret else plgpu.layout_cast(x, layout)


def load_plain(ref: Any, index: Any, *, interpret: bool) -> jax.Array:
    """Load a tile from shared memory that is not swizzled. Slow: for loads that happen once per item."""
    if interpret:
        return ref[index]
    return plgpu.load(ref.at[index], *_ALL, layout=TILE, optimized=False)


def iota(n_rows: int, n_columns: int, axis: int, *, interpret: bool) -> jax.Array:
    """[n_rows, n_columns] int32 counting along `axis`, laid out as a tile."""
    return laid_out(lax.broadcasted_iota(jnp.int32, (n_rows, n_columns), axis), TILE, interpret=interpret)


def load_row_plain(ref: Any, index: Any, *, interpret: bool) -> jax.Array:
    """Load one number for each of a tile's rows from shared memory."""
    if interpret:
        return ref[index]
    return plgpu.load(ref.at[index], *_ALL, layout=TILE_ROW, optimized=False)


def times_transposed(a: Any, b: Any, meanwhile: Callable[[], None], *, interpret: bool) -> jax.Array:
    """a @ b.T of two references [Q, D] and [C, D] in shared memory: [Q, C] float32.

    `meanwhile` is called after the product has started and before its result is awaited.
    """
    if interpret:
        meanwhile()
        return jnp.dot(a[...], b[...].T, preferred_element_type=jnp.float32)

    def product(sums: Any) -> Any:
        plgpu.wgmma(sums, a, b.transpose((1, 0)))
        meanwhile()
        return sums[...]

    return pl.run_scoped(product, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def plus_product(sums: jax.Array, a: jax.Array, b: Any, *, interpret: bool) -> jax.Array:
    """sums [Q, D] float32 plus a [Q, C] in registers times the reference b [C, D] in shared memory."""
    if interpret:
        return sums + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
    added: Any = pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(sums))
    return added


def sum_of_products(
    shape: tuple[int, int],
    n_steps: int,
    arrive: Callable[[Any], tuple[Any, Any]],
    done: Callable[[Any], None],
    *,
    interpret: bool,
) -> jax.Array:
    """The sum over all steps of a @ b.T: `shape` [m, n] float32.

    `arrive(j)` waits for step j's references a [m, k] and b [n, k] in shared memory; `done(j)` releases them.
    """
    if interpret:

        def plain(j: Any, sums: jax.Array) -> jax.Array:
            a, b = arrive(j)
            sums = sums + jnp.dot(a[...], b[...].T, preferred_element_type=jnp.float32)
            done(j)
            return sums

        return lax.fori_loop(0, n_steps, plain, jnp.zeros(shape, jnp.float32))

    def in_registers(sums: Any) -> Any:
        @pl.loop(0, n_steps)
        def _(j: Any) -> None:
            a, b = arrive(j)
            plgpu.wgmma(sums, a, b.transpose((1, 0)))
            plgpu.wgmma_wait(1)  # the previous step has been computed
            pl.when(j > 0)(lambda: done(j - 1))

        return sums[...]

    sums = pl.run_scoped(in_registers, plgpu.ACC(shape, jnp.float32))
    done(n_steps - 1)
    return sums


def put_transposed(ref: Any, i: Any, tile: jax.Array, *, interpret: bool) -> None:
    """Store a tile [64, n], in registers, as ref[i] [n, 64] in shared memory that is not swizzled."""
    if interpret:
        ref[i] = tile.T
    else:
        turned = plgpu.layout_cast(tile, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.transpose_ref(ref.at[i], (1, 0))[...] = turned


def tanh(x: jax.Array, scale: float, *, interpret: bool) -> jax.Array:
    """tanh(scale * x) float32, with an error below 1e-6: 1 - 2 / (1 + exp(2 x)), by two fast instructions.

    `tanh.approx` is one instruction, but its error of 2 ** -11 times a soft cap of 50 is 0.02 in a score.
    """
    if interpret:
        return jnp.tanh(scale * x)
    root = lax.rsqrt(1 + jnp.exp2(x * (scale * 2 * math.log2(math.e))))
    return 1 - 2 * (root * root)


def along_rows(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Broadcast [Q] to [Q, n]: each row's number in all columns."""
    return lax.broadcast_in_dim(x, shape, [0])
