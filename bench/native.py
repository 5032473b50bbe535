"""The native linear layers, products of experts and split attention against XLA's, in one process on the CPU.

    taskset -c 0 python -m bench.native [--dtype bfloat16] [--rounds 9] [--only packed]

Times are processor time, which on a shared machine leaves out the time that other programs run. On one core
it is the duration of the call; XLA starts one thread for each core that it may use.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.families.packed_form import Q4_1, Q4_K, Q6_K, Q8_0, fp8, w8a8
from orca_jax.model.attention import attention_work
from orca_jax.model.attention import split_attention as jax_attention
from orca_jax.model.kv_cache import LayerCache
from orca_jax.model.layers import grouped_matmul, matmul
from orca_jax.model.packed_weight import encoded_planes
from orca_jax.native.packed_products import native_packed
from orca_jax.native.products import native_grouped, native_linear
from orca_jax.native.split_attention import native_split_attention

LAYERS = 8  # different weights or caches in a call, so that they come from memory as in a model
BLOCK = 16
LINEAR = [(2304, 768), (768, 3072)]
EXPERTS = [(8, 2048, 768), (8, 768, 1024)]  # number, and the sizes of each
TOKENS = [1, 4, 8, 16, 32, 48, 128, 512]
# Layers and head of SmolLM2-135M, and a layer of Llama 3 8B.
PACKED = [(576, 576), (1536, 576), (576, 1536), (49152, 576), (4096, 14336)]
PACKED_FORMS = {"Q4_1": Q4_1, "Q8_0": Q8_0, "Q4_K": Q4_K, "Q6_K": Q6_K, "W8A8": w8a8(), "FP8": fp8(None)}
PACKED_TOKENS = [1, 8, 32, 512]
PACKED_BYTES = 1 << 27  # dense weights of this many bytes in a call


class Case(NamedTuple):
    """Rows of `tokens` query tokens and `keys` keys each; `group` query heads to a key/value head."""

    rows: int
    tokens: int
    keys: int
    group: int
    kv_heads: int
    head_size: int = 64
    window: int | None = None


ATTENTION = [
    Case(1, 1, 512, 1, 12),
    Case(8, 1, 512, 1, 12),
    Case(32, 1, 512, 1, 12),
    Case(1, 512, 512, 1, 12),
    Case(8, 16, 128, 1, 12),
    Case(8, 1, 512, 3, 4),
    Case(8, 1, 512, 4, 8, 128),
    Case(1, 512, 512, 3, 4),
    Case(8, 1, 1024, 3, 4, 64, 128),
]


def milliseconds(calls: dict[str, Callable[[], jax.Array]], rounds: int) -> dict[str, float]:
    """The median processor time of each call, all called in turn."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start, n = time.process_time(), 0
            while n == 0 or time.process_time() - start < 0.02:
                call().block_until_ready()
                n += 1
            taken[name].append(1e3 * (time.process_time() - start) / n)
    return {name: round(median(times[1:]), 3) for name, times in taken.items()}


def linear(dtype: Any, rounds: int) -> None:
    """LAYERS products of each shape."""
    rng = np.random.default_rng(0)
    for n_out, n_in in LINEAR:
        weights = [jnp.asarray(rng.standard_normal((n_out, n_in)), dtype) for _ in range(LAYERS)]
        for n_tokens in TOKENS:
            x = jnp.asarray(rng.standard_normal((n_tokens, n_in)), dtype)
            programs = {
                name: jax.jit(lambda x, weights, f=f: sum(f(x, w)[0, 0] for w in weights))
                for name, f in (("xla", matmul), ("native", native_linear))
            }
            report({"linear": [n_out, n_in], "tokens": n_tokens}, programs, (x, weights), rounds)


def packed(dtype: Any, rounds: int) -> None:
    """Products with packed weights and with dense ones, and how fast the packed bytes are read."""
    rng = np.random.default_rng(0)
    for n_out, n_in in PACKED:
        layers = max(1, PACKED_BYTES // (4 * n_out * n_in))
        weights = [jnp.asarray(rng.standard_normal((n_out, n_in)), dtype) for _ in range(layers)]
        for name, form in PACKED_FORMS.items():
            if n_in % form.multiple:
                continue
            encode = jax.jit(partial(encoded_planes, form))
            planes = [encode(weight) for weight in weights]
            n_bytes = sum(plane.nbytes for plane in planes[0].values())
            for n_tokens in PACKED_TOKENS:
                x = jnp.asarray(rng.standard_normal((n_tokens, n_in)), dtype)
                dense = jax.jit(lambda x, weights: sum(native_linear(x, w)[0, 0] for w in weights))
                product = jax.jit(
                    lambda x, weights, form=form: sum(native_packed(x, form, w)[0, 0] for w in weights)
                )
                calls = {"dense": partial(dense, x, weights), name: partial(product, x, planes)}
                taken = milliseconds(calls, rounds)
                speed = round(layers * n_bytes / taken[name] / 1e6, 1)
                case = {"packed": [n_out, n_in], "tokens": n_tokens, "layers": layers}
                print(json.dumps(case | taken | {"GB/s": speed}), flush=True)


def experts(dtype: Any, rounds: int) -> None:
    """LAYERS grouped products, each token to two of the experts at random."""
    rng = np.random.default_rng(0)
    for n_experts, n_out, n_in in EXPERTS:
        shape = (n_experts, n_out, n_in)
        weights = [jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(LAYERS)]
        for n_tokens in TOKENS:
            x = jnp.asarray(rng.standard_normal((2 * n_tokens, n_in)), dtype)
            sizes = jnp.asarray(np.bincount(rng.integers(0, n_experts, len(x)), minlength=n_experts), "int32")
            programs = {
                name: jax.jit(lambda x, weights, sizes, f=f: sum(f(x, w, sizes)[0, 0] for w in weights))
                for name, f in (("xla", grouped_matmul), ("native", native_grouped))
            }
            report({"experts": [*shape], "tokens": n_tokens}, programs, (x, weights, sizes), rounds)


def attention(dtype: Any, rounds: int) -> None:
    """LAYERS times the attention of each case."""
    rng = np.random.default_rng(0)
    for case in ATTENTION:
        n_blocks = -(-case.keys // BLOCK)
        shape = (case.rows * n_blocks, case.kv_heads, BLOCK, case.head_size)
        caches = [
            LayerCache(*(jnp.asarray(rng.standard_normal(shape), dtype) for _ in "kv")) for _ in range(LAYERS)
        ]
        table = jnp.asarray(rng.permutation(case.rows * n_blocks).reshape(case.rows, -1), jnp.int32)
        row_start = jnp.arange(case.rows + 1, dtype=jnp.int32) * case.tokens
        kv_length = jnp.full(case.rows, case.keys, jnp.int32)
        q_shape = (case.rows * case.tokens, case.group, case.kv_heads, case.head_size)
        q = jnp.asarray(rng.standard_normal(q_shape), dtype)
        layers = {"xla": xla_layers, "native": native_layers}
        programs = {name: jax.jit(partial(run, window=case.window)) for name, run in layers.items()}
        report(case._asdict(), programs, (q, caches, table, row_start, kv_length), rounds)


def native_layers(
    q: jax.Array, caches: list[LayerCache], *tables: jax.Array, window: int | None
) -> jax.Array:
    """One layer's result is the next one's queries."""
    for cache in caches:
        q = native_split_attention(q, *cache.both, *tables, window=window)
    return q


def xla_layers(q: jax.Array, caches: list[LayerCache], *tables: jax.Array, window: int | None) -> jax.Array:
    """The same in pure JAX, following the real lengths."""
    table, row_start, kv_length = tables
    work = attention_work(row_start, kv_length, q.shape[0], follow_lengths=True)
    for cache in caches:
        q = jax_attention(q, cache, table, row_start, kv_length, work, follow_lengths=True, window=window)
    return q


def report(
    case: dict[str, Any], programs: dict[str, Callable[..., jax.Array]], arguments: Any, rounds: int
) -> None:
    """Print one line of JSON: the case, and milliseconds by program."""
    calls = {name: partial(program, *arguments) for name, program in programs.items()}
    print(json.dumps(case | milliseconds(calls, rounds)), flush=True)


def main() -> None:
    """Measure all four, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    parts = {"linear": linear, "packed": packed, "experts": experts, "attention": attention}
    parser.add_argument("--only", choices=parts)
    options = parser.parse_args()
    for name, measure in parts.items():
        if options.only in (None, name):
            measure(options.dtype, options.rounds)


if __name__ == "__main__":
    main()
