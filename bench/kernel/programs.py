"""Our own timed programs: the kernel, the engine's path without it, and one kernel launch per request.

All three read keys and values from a pool of blocks in random order. The pool holds several sets of the same
batch's keys and values, and each call's block table selects one.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel.clock import Call, value_spread
from bench.kernel.oracle import Errors, attend_row, errors
from bench.kernel.shapes import ITEM_BYTES, LONGEST, Case
from orca_jax.model.attention import attention_work
from orca_jax.model.attention import split_attention as static_attention
from orca_jax.model.kv_cache import LayerCache
from orca_jax.pallas.split_attention import split_attention
from orca_jax.pallas.work_list.bounds import Plan
from orca_jax.pallas.work_list.work_items import work_items

DTYPE = jnp.bfloat16
_PAST_CACHE = 160 << 20  # bytes of keys and values that calls in a row read: well over 60 MB of L2
_MOST_APART = 1 << 30  # bytes of sets that are apart, but for one
_BASE_BYTES = 64 << 20  # of random numbers that are drawn; a larger array repeats them


@dataclass(frozen=True, slots=True)
class Arrays:
    """A program's arguments: queries, arrays shared by all calls, and a set for each call."""

    q: Any
    shared: Any
    sets: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Program:
    """A subject at a case: `call(q, shared, one)` gives a result like q. Programs with equal keys compile
    alike.

    `shapes` has the arrays' shapes and one entry in `sets`; `make(seed)` has them all, on the device.
    `tokens` gives [T, N, D] of a q or result; `keys_values(arrays, row, kv_head)` the first set's keys and
    values [L or more, D].
    """

    key: Hashable
    call: Call
    n_calls: int
    shapes: Arrays
    make: Callable[[int], Arrays]
    tokens: Callable[[Any], Any]
    keys_values: Callable[[Arrays, int, int], tuple[Any, Any]]


def with_list(*arrays: Any, plan: Plan, soft_cap: float | None = None, interpret: bool) -> jax.Array:
    """`split_attention` of its six arrays, with its work list as the seventh."""
    *batch, work = arrays
    options = {"window": plan.window, "soft_cap": soft_cap, "interpret": interpret}
    return split_attention(*batch, work=work, plan=plan, **options)


def flat_heads(x: jax.Array) -> jax.Array:
    """[T, G, K, D] as [T, N, D], with a group's heads next to each other."""
    return x.swapaxes(1, 2).reshape(len(x), -1, x.shape[-1])


def shape_of(*shape: int, dtype: Any = DTYPE) -> jax.ShapeDtypeStruct:
    """An array's shape and dtype, without the array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def drawn(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Normally distributed numbers; a large array repeats its first part along the first axis."""
    n = max(1, min(shape[0], _BASE_BYTES // (math.prod(shape[1:]) * ITEM_BYTES)))
    base = _normal(jnp.uint32(seed), (n, *shape[1:]))
    return base if n == shape[0] else _repeated(base, shape[0])


@partial(jax.jit, static_argnames="shape")
def _normal(seed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, DTYPE)


@partial(jax.jit, static_argnames="n")
def _repeated(base: jax.Array, n: int) -> jax.Array:
    return base[jnp.arange(n) % len(base)]


@jax.jit
def spread(values: jax.Array, factor: jax.Array) -> jax.Array:
    """`values` times `factor`, which broadcasts."""
    return (values * factor).astype(values.dtype)


def calls_past_cache(kv_bytes: int, *, least: int, most: int) -> int:
    """A number of calls, a power of two and at most `most`, that reads more than the L2 cache holds."""
    return min(most, max(least, 1 << max(0, (_PAST_CACHE // kv_bytes).bit_length())))


@dataclass(frozen=True, slots=True)
class Pool:
    """The blocks of a batch's sets: tables [n_sets, R, max_blocks], and each block's index in its row."""

    tables: np.ndarray
    index: np.ndarray


def lay_out(case: Case, n_sets: int, *, block_size: int, max_blocks: int, n_blocks: int, seed: int) -> Pool:
    """Lay out as many sets with separate shuffled blocks as fit, then the same sets again."""
    rng = np.random.default_rng(seed)
    needed = np.array([-(-n // block_size) for _, n in case.rows])
    each = int(needed.sum())
    assert each <= n_blocks
    ids = rng.permutation(n_blocks).astype(np.int32)
    n_apart = min(n_sets, n_blocks // each)
    tables = np.zeros((n_apart, len(needed), max_blocks), np.int32)
    index = np.zeros(n_blocks, np.int32)
    there = np.arange(max_blocks) < needed[:, None]  # [R, max_blocks]
    for s, table in enumerate(tables):
        table[there] = ids[s * each : (s + 1) * each]
        index[table[there]] = np.nonzero(there)[1]
    return Pool(tables[np.arange(n_sets) % n_apart], index)


def pooled(
    case: Case, subject: str, *, n_cores: int, longest: int = LONGEST, interpret: bool = False
) -> Program:
    """`kernel`, `static` or `per request` over a pool of blocks.

    The kernel's decodes have a pool and tables sized for the longest context, as in an engine: one program
    serves every context. With `interpret` the kernel runs on the CPU, one call at a time.
    """
    block_size = case.block_size
    heads = case.heads
    n_kv, head_size = heads.n_kv_heads, heads.head_size
    n_rows, n_tokens = len(case.rows), case.n_tokens
    same_program = case.increments_only and subject == "kernel" and case.rows.count(case.rows[0]) == n_rows
    max_keys = longest if same_program else max(n for _, n in case.rows)
    max_blocks = -(-max_keys // block_size)
    least_bytes = case.kv_bytes if not same_program else case.kv_bytes * 128 // case.rows[0][1]
    n_calls = {
        "kernel": calls_past_cache(max(1, least_bytes), least=4, most=64 if same_program else 16),
        "static": 2,
        "per request": max(1, 32 // n_rows),
    }[subject]
    n_calls = 1 if interpret else n_calls
    each = sum(-(-n // block_size) for _, n in case.rows)
    n_apart = max(1, min(n_calls, _MOST_APART // case.kv_bytes))
    n_blocks = n_rows * max_blocks if same_program else each * n_apart

    plan = Plan(n_tokens, n_rows, n_kv, heads.group, block_size, n_cores)
    lengths = [n for n, _ in case.rows]
    row_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    kv_length = np.array([n for _, n in case.rows], np.int32)
    pool_shape = (n_blocks, n_kv, block_size, head_size)
    pools = (shape_of(*pool_shape),) * 2

    def int32(*shape: int) -> jax.ShapeDtypeStruct:
        return shape_of(*shape, dtype=jnp.int32)

    # Each row's row_start, kv_length, plan and work list; equal rows share a kernel.
    alone = [Plan(n, 1, n_kv, heads.group, block_size, n_cores) for n in lengths]
    starts = [np.array([0, n], np.int32) for n in lengths]

    def kernel(q: jax.Array, shared: Any, table: jax.Array) -> jax.Array:
        k_pool, v_pool, starts, ends, work = shared
        return with_list(q, k_pool, v_pool, table, starts, ends, work, plan=plan, interpret=interpret)

    def static(q: jax.Array, shared: Any, table: jax.Array) -> jax.Array:
        k_pool, v_pool, starts, ends = shared
        work = attention_work(starts, ends, n_tokens, follow_lengths=False)
        cache = LayerCache(k_pool, v_pool)
        return static_attention(q, cache, table, starts, ends, work, follow_lengths=False)

    one_row = jax.jit(with_list, static_argnames=("plan", "interpret"))

    def per_request(q: Any, shared: Any, table: Any) -> Any:
        k_pool, v_pool, starts, ends, works = shared
        return [
            one_row(
                q[r], k_pool, v_pool, table[r], starts[r], ends[r], works[r], plan=plan, interpret=interpret
            )
            for r, plan in enumerate(alone)
        ]

    def indices() -> Any:
        if subject == "kernel":
            return row_start, kv_length, work_items(row_start, kv_length, plan)
        if subject == "static":
            return row_start, kv_length
        ends = [kv_length[r : r + 1] for r in range(n_rows)]
        return starts, ends, [work_items(*three) for three in zip(starts, ends, alone, strict=True)]

    def make(seed: int) -> Arrays:
        pool = lay_out(
            case, n_calls, block_size=block_size, max_blocks=max_blocks, n_blocks=n_blocks, seed=seed
        )
        position = pool.index[:, None] * block_size + np.arange(block_size)
        factor = jnp.asarray(value_spread(position)[:, None, :, None])
        keys, values = (
            drawn(seed, pool_shape),
            spread(drawn(seed + 1, pool_shape), factor),
        )
        q = drawn(seed + 2, (n_tokens, heads.group, n_kv, head_size))
        tables = [jnp.asarray(table) for table in pool.tables]
        rest = jax.tree.map(jnp.asarray, indices())
        if subject == "per request":
            q = [q[row_start[r] : row_start[r + 1]] for r in range(n_rows)]
            tables = [[table[r : r + 1] for r in range(n_rows)] for table in tables]
        return Arrays(q, (keys, values, *rest), tables)

    def keys_values(arrays: Arrays, row: int, kv_head: int) -> tuple[Any, Any]:
        table = arrays.sets[0][row][0] if subject == "per request" else arrays.sets[0][row]
        return _of_row(arrays.shared[0], table, kv_head), _of_row(arrays.shared[1], table, kv_head)

    call: Call = {"kernel": kernel, "static": static, "per request": per_request}[subject]
    index_shapes = jax.tree.map(lambda a: int32(*a.shape), indices())
    if subject == "per request":
        q_shape: Any = [shape_of(n, heads.group, n_kv, head_size) for n in lengths]
        set_shape: Any = [int32(1, max_blocks)] * n_rows
    else:
        q_shape, set_shape = shape_of(n_tokens, heads.group, n_kv, head_size), int32(n_rows, max_blocks)
    return Program(
        key=(subject, heads, block_size, n_rows, n_tokens, n_calls, n_blocks, max_blocks, tuple(lengths)),
        call=call,
        n_calls=n_calls,
        shapes=Arrays(q_shape, (*pools, *index_shapes), [set_shape]),
        make=make,
        tokens=lambda q: flat_heads(jnp.concatenate(q) if subject == "per request" else q),
        keys_values=keys_values,
    )


@jax.jit
def _of_row(pool: jax.Array, table: jax.Array, kv_head: int) -> jax.Array:
    """One head's keys or values of a row [max_blocks * B, D]."""
    return pool[table, kv_head].reshape(-1, pool.shape[-1])


def sampled_errors(case: Case, program: Program, arrays: Arrays, result: Any, *, seed: int) -> Errors:
    """Errors of the first call's result against float64, for some queries of some rows and two key/value
    heads.
    """
    rng = np.random.default_rng(seed)
    q, out = program.tokens(arrays.q), program.tokens(result)
    group, n_kv = case.heads.group, case.heads.n_kv_heads
    row_start = np.concatenate([[0], np.cumsum([n for n, _ in case.rows])])
    got, true = [], []
    for row in sorted({0, len(case.rows) - 1, int(rng.integers(len(case.rows)))}):
        length, n_keys = case.rows[row]
        chosen = sorted({0, length - 1, *rng.integers(length, size=3).tolist()})
        for kv_head in (int(rng.integers(n_kv)), n_kv - 1):
            pair = program.keys_values(arrays, row, kv_head)
            keys, values = (np.asarray(x, np.float32)[:n_keys] for x in pair)
            for i in chosen:
                mine = (int(row_start[row]) + i, slice(kv_head * group, (kv_head + 1) * group))
                n_seen = n_keys - length + i + 1
                query = np.asarray(q[mine], np.float32)[None]
                true.append(attend_row(query, keys[:n_seen], values[:n_seen], first=n_seen - 1)[0])
                got.append(np.asarray(out[mine], np.float32))
    return errors(np.stack(got), np.stack(true))
