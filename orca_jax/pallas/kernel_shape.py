"""The static sizes of one compiled split-attention kernel, checked before anything is compiled.

Q is the number of query rows in a warp group's tile, the height of Hopper's matrix instruction. C is the
number of keys in a slot of the ring in shared memory.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from orca_jax.errors import ConfigError
from orca_jax.pallas.work_list.bounds import Plan
from orca_jax.pallas.work_list.work_items import work_items

Q = 64
HEAD_SIZES = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
DTYPES = ("bfloat16", "float16")
SHARED_BYTES = 226 * 1024  # for tiles and ring; a Hopper block has 227 KiB, and the barriers need some


def unsupported(
    head_size: int, block_size: int, dtype_name: str, n_heads: int, n_kv_heads: int
) -> str | None:
    """Why the kernel cannot run a model of these sizes, as a clause; None if it can."""
    if head_size not in HEAD_SIZES:
        return f"its head size is {head_size}; the kernel has {_listed(HEAD_SIZES)}"
    if block_size not in BLOCK_SIZES:
        return f"its blocks have {block_size} slots; the kernel has {_listed(BLOCK_SIZES)}"
    if dtype_name not in DTYPES:
        return f"its K/V cache is {dtype_name}; the kernel has {_listed(DTYPES)}"
    if n_kv_heads < 1 or n_heads < 1 or n_heads % n_kv_heads:
        return f"its {n_heads} heads are not a multiple of its {n_kv_heads} key/value heads"
    if n_heads // n_kv_heads > Q:
        return (
            f"each of its key/value heads has {n_heads // n_kv_heads} query heads; the kernel packs up to {Q}"
        )
    return None


def _listed(allowed: tuple[object, ...]) -> str:
    return ", ".join(map(str, allowed))


@dataclass(frozen=True, slots=True)
class KernelShape:
    """The static sizes of one compiled kernel. The window is the plan's."""

    n_tokens: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    block_size: int
    scale: float
    soft_cap: float | None
    plan: Plan
    interpret: bool

    @property
    def group(self) -> int:
        """G: query heads per key/value head."""
        return self.n_heads // self.n_kv_heads

    @property
    def padded_group(self) -> int:
        """G rounded up to a multiple of 8: copies into shared memory must be multiples of 128 bytes."""
        return -(-self.group // 8) * 8

    @property
    def tokens(self) -> int:
        """Tokens in a warp group's tile, each with `plan.packed` heads."""
        return self.plan.tile_tokens // 2

    @property
    def step(self) -> int:
        """C: keys in a slot of the ring. Heads of 256 leave registers for 64."""
        return 128 if self.head_size <= 128 else 64

    @property
    def n_values(self) -> int:
        """Columns of the values, and so of the sums, of a warp group."""
        return self.head_size

    @property
    def copied(self) -> int:
        """Keys in one copy: a K/V block or a part of one."""
        return self.plan.granule

    @property
    def aliased(self) -> bool:
        """Whether queries and results share memory. The interpreter cannot alias."""
        return not self.interpret

    @property
    def n_rounded(self) -> int:
        """Arrays that hold a part's result: its rounded value and, if 2, the remainder of the rounding.

        A float32 tile would need a buffer of twice the size. Heads of 256 leave no registers for the
        remainder.
        """
        return 2 if self.head_size <= 128 else 1

    @property
    def n_slots(self) -> int:
        """Slots of the ring: as many as fit in shared memory, at most 8."""
        tiles = 2 * Q * 2 * self.head_size
        return min(4 if self.interpret else 8, (SHARED_BYTES - tiles) // (2 * self.step * self.head_size * 2))


def swizzle_bytes(head_size: int) -> int:
    """The widest swizzle of shared memory that divides a head of 16-bit numbers: 128, 64 or 32 bytes."""
    return next(b for b in (128, 64, 32) if head_size * 2 % b == 0)


def kernel_shape(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_table: jax.Array,
    row_start: jax.Array,
    kv_length: jax.Array,
    *,
    group: int | None,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
    plan: Plan | None,
    interpret: bool,
) -> KernelShape:
    """The kernel's sizes for these arguments of `split_attention`. Raises ConfigError if they do not fit."""
    if q.ndim != 4 or k_cache.ndim != 4 or block_table.ndim != 2 or kv_length.ndim != 1:
        raise ConfigError(
            f"split attention got q {q.shape}, k_cache {k_cache.shape}, block_table {block_table.shape} and "
            f"kv_length {kv_length.shape}; they must be [T, n, K, D], [n_blocks, K, B, D], [R, max_blocks] "
            "and [R]"
        )
    n_tokens, n_slices, n_kv_heads, head_size = q.shape
    _, _, block_size, _ = k_cache.shape
    n_rows = len(kv_length)
    group = n_slices if group is None else group
    if not 0 < group <= n_slices:
        raise ConfigError(f"group is {group}; q {q.shape} has {n_slices} heads for each key/value head")
    expected = {
        "k_cache": (k_cache, (len(k_cache), n_kv_heads, block_size, head_size), q.dtype),
        "v_cache": (v_cache, k_cache.shape, q.dtype),
        "block_table": (block_table, (n_rows, *block_table.shape[1:]), jnp.int32),
        "row_start": (row_start, (n_rows + 1,), jnp.int32),
        "kv_length": (kv_length, (n_rows,), jnp.int32),
    }
    for name, (array, shape, dtype) in expected.items():
        if array.shape != shape or array.dtype != dtype:
            raise ConfigError(
                f"{name} is {array.dtype.name} {array.shape}; with q {q.dtype.name} {q.shape}, k_cache "
                f"{k_cache.shape} and kv_length {kv_length.shape} it must be {jnp.dtype(dtype).name} {shape}"
            )
    if 0 in (*q.shape, *k_cache.shape, *block_table.shape):
        raise ConfigError(
            f"q is {q.shape}, k_cache {k_cache.shape}, block_table {block_table.shape}; none may be empty"
        )
    if reason := unsupported(head_size, block_size, q.dtype.name, group * n_kv_heads, n_kv_heads):
        raise ConfigError(
            f"the split-attention kernel does not support this model: {reason}; use the pure-JAX path"
        )
    for name, value in {"scale": scale, "window": window, "soft_cap": soft_cap}.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name} is {value!r}; it must be above 0")
    sizes = (n_tokens, n_rows, n_kv_heads, group, block_size)
    plan = plan or Plan(*sizes, window=window)
    if (plan.n_tokens, plan.n_rows, plan.n_kv_heads, plan.group, plan.block_size) != sizes:
        raise ConfigError(f"{plan} does not fit these arguments; make it with the sizes {sizes}")
    if plan.window != window:
        raise ConfigError(f"window is {window}, but {plan} has another; make the plan with the same window")
    return KernelShape(
        n_tokens=n_tokens,
        n_heads=group * n_kv_heads,
        n_kv_heads=n_kv_heads,
        head_size=head_size,
        block_size=block_size,
        scale=head_size**-0.5 if scale is None else scale,
        soft_cap=soft_cap,
        plan=plan,
        interpret=interpret,
    )


def checked_work(work: jax.Array | None, row_start: jax.Array, kv_length: jax.Array, plan: Plan) -> jax.Array:
    """The work list that was given or, if None, one that the host makes, even under a trace.

    Raises ConfigError unless a given one has the shape and dtype of the plan's list.
    """
    if work is None:
        return _made_work(row_start, kv_length, plan)
    if work.shape != plan.list_shape or work.dtype != jnp.int32:
        raise ConfigError(
            f"work is {work.dtype.name} {work.shape}; the list of {plan} is int32 {plan.list_shape}: make it "
            "with work_items(row_start, kv_length, plan)"
        )
    return work


def _made_work(row_start: jax.Array, kv_length: jax.Array, plan: Plan) -> jax.Array:
    if not isinstance(row_start, Tracer) and not isinstance(kv_length, Tracer):
        return jnp.asarray(work_items(np.asarray(row_start), np.asarray(kv_length), plan))
    made = jax.ShapeDtypeStruct(plan.list_shape, jnp.int32)
    return jax.pure_callback(
        lambda start, length: work_items(np.asarray(start), np.asarray(length), plan),
        made,
        row_start,
        kv_length,
    )
