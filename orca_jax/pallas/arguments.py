"""Checks the arguments of `split_attention` before anything is compiled."""

import jax
import jax.numpy as jnp

from orca_jax.errors import ConfigError
from orca_jax.pallas.kernel_shape import KernelShape, unsupported
from orca_jax.pallas.work_list.bounds import Plan


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
    """The kernel's sizes for these arguments of `split_attention`. Raises ConfigError."""
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


def check_work(work: jax.Array, plan: Plan) -> None:
    """Raises ConfigError unless `work` has the shape and dtype of the plan's list."""
    if work.shape != plan.list_shape or work.dtype != jnp.int32:
        raise ConfigError(
            f"work is {work.dtype.name} {work.shape}; the list of {plan} is int32 {plan.list_shape}: make it "
            "with work_items(row_start, kv_length, plan)"
        )
