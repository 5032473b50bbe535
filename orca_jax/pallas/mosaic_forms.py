# pyright: reportPrivateImportUsage=false
"""The operations of Mosaic GPU that jax 0.10's interpreter lacks, each with a plain form to stand in for it.

`interpret` is static: compiled kernels hold none of the plain forms. Q queries, C keys, D head size.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import params
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# In the open since jax 0.11; before that where the interpreter itself has them.
InterpretGPUParams: Any = getattr(plgpu, "InterpretGPUParams", None) or params.InterpretGPUParams

# The index that jax 0.10 must be given and 0.11 warns of.
_ALL: tuple[Any, ...] = ((),) if jax.__version_info__ < (0, 11) else ()

TILE = plgpu.Layout.WGMMA  # how a warp group holds a [64, n] product in its registers
TILE_ROW = plgpu.Layout.WGMMA.reduce(1)  # one number for each of such a tile's rows


def laid_out(x: jax.Array, layout: Any, *, interpret: bool) -> jax.Array:
    """`x` in registers in `layout`."""
    return x if interpret else plgpu.layout_cast(x, layout)


def load_plain(ref: Any, index: Any, *, interpret: bool) -> jax.Array:
    """A tile from shared memory that is not shuffled: right, not fast; for what happens once per item."""
    if interpret:
        return ref[index]
    return plgpu.load(ref.at[index], *_ALL, layout=TILE, optimized=False)


def iota(n_rows: int, n_columns: int, axis: int, *, interpret: bool) -> jax.Array:
    """[n_rows, n_columns] int32 that counts along `axis`, laid out as a tile."""
    return laid_out(lax.broadcasted_iota(jnp.int32, (n_rows, n_columns), axis), TILE, interpret=interpret)


def load_row_plain(ref: Any, index: Any, *, interpret: bool) -> jax.Array:
    """One number for each of a tile's rows, from shared memory."""
    if interpret:
        return ref[index]
    return plgpu.load(ref.at[index], *_ALL, layout=TILE_ROW, optimized=False)


def times_transposed(a: Any, b: Any, meanwhile: Callable[[], None], *, interpret: bool) -> jax.Array:
    """a @ b.T of two references [Q, D] and [C, D] in shared memory: [Q, C] float32.

    `meanwhile` is what the warp group does between asking for the product and waiting for it.
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


def along_rows(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """[Q] as [Q, n]: the number of a row in each of its columns."""
    return lax.broadcast_in_dim(x, shape, [0])
