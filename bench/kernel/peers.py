"""JAX's own attention for GPUs on the same batches: cuDNN for both phases, Pallas kernels for each.

Each gets keys and values in the layout that it reads without a transposition.
"""

import importlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel.clock import value_spread
from bench.kernel.programs import DTYPE, Arrays, Program, calls_past_cache, drawn, lay_out, shape_of, spread
from bench.kernel.shapes import Case, Subject

_FULL = 2 * 132  # thread blocks that fill the chip's cores, two each
_MOST_CALLS = 16


class NoPeer(Exception):
    """A peer that is not available here or for this batch; the message says why."""


def peer(case: Case, subject: Subject) -> Program:
    """The program of a peer. Raises NoPeer."""
    lengths = set(case.rows)
    if len(lengths) > 1:
        raise NoPeer("supports only rows of one length")
    makers: dict[str, Callable[..., Program]] = {
        "cudnn": _cudnn, "cudnn paged": _cudnn_paged, "attention_mgpu": _mgpu,
        "decode_attention": _decode, "paged_attention": _paged,
    }  # fmt: skip
    return makers[subject](case)


def splits(case: Case, *, least_keys: int) -> int:
    """The number of parts of a row's keys, a power of two, that fills the chip; each has `least_keys` or
    more.
    """
    wanted = _FULL / (len(case.rows) * case.heads.n_kv_heads)
    most = max(1, case.rows[0][1] // least_keys)
    return min(1 << max(0, math.ceil(math.log2(wanted))), 1 << (most.bit_length() - 1))


def _module(name: str) -> Any:
    """jax.experimental.pallas.ops.gpu.`name`, which jax 0.11 calls deprecated."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module(f"jax.experimental.pallas.ops.gpu.{name}")
    except ImportError as error:
        raise NoPeer(f"jax {jax.__version__} has no {name}: {error}") from error


def _dense(
    case: Case,
    subject: Subject,
    call: Callable[[Any, Any], Any],
    *,
    q_shape: tuple[int, ...],
    kv_shape: tuple[int, ...],
    key_axis: int,
    of_row: Callable[[Any, int, int], Any],
    dtype: Any = DTYPE,
) -> Program:
    """A peer whose keys and values are two arrays, with the keys' positions along `key_axis`."""
    n_calls = calls_past_cache(case.kv_bytes, least=4, most=_MOST_CALLS)
    n_apart = max(1, min(n_calls, (1 << 30) // case.kv_bytes))
    n_keys = kv_shape[key_axis]
    heads = case.heads

    def make(seed: int) -> Arrays:
        along = [1] * len(kv_shape)
        along[key_axis] = n_keys
        factor = jnp.asarray(value_spread(np.arange(n_keys)).reshape(along))
        apart = [
            (
                drawn(seed + 2 * i, kv_shape).astype(dtype),
                spread(drawn(seed + 2 * i + 1, kv_shape), factor).astype(dtype),
            )
            for i in range(n_apart)
        ]
        return Arrays(
            drawn(seed + 99, q_shape).astype(dtype), (), [apart[i % n_apart] for i in range(n_calls)]
        )

    def keys_values(arrays: Arrays, row: int, kv_head: int) -> tuple[Any, Any]:
        keys, values = arrays.sets[0]
        return of_row(keys, row, kv_head), of_row(values, row, kv_head)

    return Program(
        key=(subject, case),
        call=lambda q, shared, one: call(q, one),
        n_calls=n_calls,
        shapes=Arrays(
            shape_of(*q_shape, dtype=dtype),
            (),
            [(shape_of(*kv_shape, dtype=dtype), shape_of(*kv_shape, dtype=dtype))],
        ),
        make=make,
        tokens=lambda q: q.reshape(case.n_tokens, heads.n_heads, heads.head_size),
        keys_values=keys_values,
    )


def _cudnn(case: Case) -> Program:
    length, n_keys = case.rows[0]
    if length != n_keys:
        raise NoPeer("its causal mask starts at the first key: whole prompts only")
    heads, n_rows = case.heads, len(case.rows)

    def call(q: jax.Array, one: Any) -> jax.Array:
        return jax.nn.dot_product_attention(q, *one, is_causal=True, implementation="cudnn")

    return _dense(
        case, "cudnn", call,
        q_shape=(n_rows, length, heads.n_heads, heads.head_size),
        kv_shape=(n_rows, n_keys, heads.n_kv_heads, heads.head_size),
        key_axis=1,
        of_row=lambda kv, row, kv_head: kv[row, :, kv_head],
    )  # fmt: skip


def _mgpu(case: Case) -> Program:
    """attention_mgpu, causal and in float16 only. It has no scale, so the queries are scaled before."""
    length, n_keys = case.rows[0]
    heads, n_rows = case.heads, len(case.rows)
    if length != n_keys or length % 256 or heads.head_size % 64:
        raise NoPeer("supports whole prompts of a multiple of 256 tokens, and head sizes of a multiple of 64")
    module = _module("attention_mgpu")
    block_kv = 128 if heads.head_size <= 128 else 64  # what fits into shared memory
    config = module.TuningConfig(block_q=64, block_kv=block_kv, max_concurrent_steps=2, causal=True)
    scale = heads.head_size**-0.5

    def call(q: jax.Array, one: Any) -> jax.Array:
        keys, values = one
        return module.attention(q * jnp.asarray(scale, q.dtype), keys, values, config)

    return _dense(
        case, "attention_mgpu", call,
        q_shape=(n_rows, length, heads.n_heads, heads.head_size),
        kv_shape=(n_rows, n_keys, heads.n_kv_heads, heads.head_size),
        key_axis=1,
        of_row=lambda kv, row, kv_head: kv[row, :, kv_head],
        dtype=jnp.float16,
    )  # fmt: skip


def _cudnn_paged(case: Case) -> Program:
    """cuDNN over our own blocks: a pool [n_blocks, K, B, D] for keys and one for values."""
    if not case.increments_only:
        raise NoPeer("supports one query token per row here")
    try:
        attention: Any = importlib.import_module("orca_jax.cudnn.paged_attention").paged_attention
    except ImportError as error:
        raise NoPeer(f"there is no cuDNN path: {error}") from error
    heads, n_rows, n_keys, block_size = case.heads, len(case.rows), case.rows[0][1], case.block_size
    n_calls = calls_past_cache(case.kv_bytes, least=4, most=_MOST_CALLS)
    n_apart = max(1, min(n_calls, (1 << 30) // case.kv_bytes))
    max_blocks = -(-n_keys // block_size)
    pool_shape = (n_apart * n_rows * max_blocks, heads.n_kv_heads, block_size, heads.head_size)
    q_shape = (n_rows, heads.n_heads, heads.head_size)

    def call(q: jax.Array, shared: Any, table: jax.Array) -> jax.Array:
        keys, values, lengths = shared
        out, _ = attention(q[:, None], keys, values, lengths, table, scale=heads.head_size**-0.5)
        return out[:, 0]

    def make(seed: int) -> Arrays:
        pool = lay_out(
            case, n_calls, block_size=block_size, max_blocks=max_blocks, n_blocks=pool_shape[0], seed=seed
        )
        position = pool.index[:, None] * block_size + np.arange(block_size)
        factor = jnp.asarray(value_spread(position)[:, None, :, None])
        pools = (drawn(seed, pool_shape), spread(drawn(seed + 1, pool_shape), factor))
        shared = (*pools, jnp.full(n_rows, n_keys, jnp.int32))
        return Arrays(drawn(seed + 2, q_shape), shared, [jnp.asarray(table) for table in pool.tables])

    def keys_values(arrays: Arrays, row: int, kv_head: int) -> tuple[Any, Any]:
        keys, values, _ = arrays.shared
        at = arrays.sets[0][row]
        flat = [pool[at, kv_head].reshape(-1, heads.head_size) for pool in (keys, values)]
        return flat[0], flat[1]

    return Program(
        key=("cudnn paged", case),
        call=call,
        n_calls=n_calls,
        shapes=Arrays(
            shape_of(*q_shape),
            (shape_of(*pool_shape), shape_of(*pool_shape), shape_of(n_rows, dtype=jnp.int32)),
            [shape_of(n_rows, max_blocks, dtype=jnp.int32)],
        ),
        make=make,
        tokens=lambda q: q,
        keys_values=keys_values,
    )


def _decode(case: Case) -> Program:
    """decode_attention's multi-query form, with a batch entry per row and key/value head.

    Its `gqa` would transpose all keys first.
    """
    if not case.increments_only:
        raise NoPeer("supports one query token per row")
    mqa = _module("decode_attention").mqa
    heads, n_rows, n_keys = case.heads, len(case.rows), case.rows[0][1]
    k_splits = splits(case, least_keys=128)

    def call(q: jax.Array, one: Any) -> jax.Array:
        return mqa(q, *one, k_splits=k_splits, block_k=128).astype(q.dtype)  # it gives float32

    n_kv = heads.n_kv_heads
    return _dense(
        case, "decode_attention", call,
        q_shape=(n_rows * n_kv, heads.group, heads.head_size),
        kv_shape=(n_rows * n_kv, n_keys, heads.head_size),
        key_axis=1,
        of_row=lambda kv, row, kv_head: kv[row * n_kv + kv_head],
    )  # fmt: skip


def _paged(case: Case) -> Program:
    """paged_attention, whose pool is [K, n_blocks, B, D]. It has no scale, so D ** -0.5 is in the keys."""
    if not case.increments_only:
        raise NoPeer("supports one query token per row")
    paged_attention = _module("paged_attention").paged_attention
    heads, n_rows, n_keys, block_size = case.heads, len(case.rows), case.rows[0][1], case.block_size
    n_kv, head_size = heads.n_kv_heads, heads.head_size
    n_calls = calls_past_cache(case.kv_bytes, least=4, most=_MOST_CALLS)
    n_apart = max(1, min(n_calls, (1 << 30) // case.kv_bytes))
    max_blocks = n_keys // block_size
    pool_shape = (n_kv, n_apart * n_rows * max_blocks, block_size, head_size)
    k_splits = splits(case, least_keys=8 * block_size)

    def call(q: jax.Array, shared: Any, table: jax.Array) -> jax.Array:
        keys, values, lengths = shared
        return paged_attention(q, keys, values, table, lengths, k_splits=k_splits, pages_per_compute_block=8)

    def make(seed: int) -> Arrays:
        pool = lay_out(
            case, n_calls, block_size=block_size, max_blocks=max_blocks, n_blocks=pool_shape[1], seed=seed
        )
        position = pool.index[:, None] * block_size + np.arange(block_size)
        factor = jnp.asarray(value_spread(position)[None, :, :, None])
        keys = spread(drawn(seed, pool_shape), jnp.float32(head_size**-0.5))
        values = spread(drawn(seed + 1, pool_shape), factor)
        q = drawn(seed + 2, (n_rows, heads.n_heads, head_size))
        lengths = jnp.full(n_rows, n_keys, jnp.int32)
        return Arrays(q, (keys, values, lengths), [jnp.asarray(table) for table in pool.tables])

    def keys_values(arrays: Arrays, row: int, kv_head: int) -> tuple[Any, Any]:
        keys, values, _ = arrays.shared
        at = arrays.sets[0][row]
        flat = [pool[kv_head, at].reshape(-1, head_size) for pool in (keys, values)]
        return flat[0] * head_size**0.5, flat[1]

    pools = (shape_of(*pool_shape),) * 2
    return Program(
        key=("paged_attention", case),
        call=call,
        n_calls=n_calls,
        shapes=Arrays(
            shape_of(n_rows, heads.n_heads, head_size),
            (*pools, shape_of(n_rows, dtype=jnp.int32)),
            [shape_of(n_rows, max_blocks, dtype=jnp.int32)],
        ),
        make=make,
        tokens=lambda q: q,
        keys_values=keys_values,
    )
