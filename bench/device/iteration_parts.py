"""Times the device's parts of an iteration one by one, on the engine's own weights and caches."""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.aot.measured_device import seconds
from orca_jax.execution.attention_paths import AttentionPath
from orca_jax.execution.host_buffer import HostBuffer
from orca_jax.families.model_config import FeedForward, ModelConfig
from orca_jax.families.parameters import HEAD, TOKEN_EMBEDDING, layer_parameters
from orca_jax.iteration.flat_batch import FlatBatch, FlatLayout, TokenPrograms
from orca_jax.model.feed_forward import activate, between
from orca_jax.model.kv_cache import LayerCache
from orca_jax.model.layers import Matmul
from orca_jax.model.sampler import greedy


def filled(caches: Sequence[LayerCache]) -> list[LayerCache]:
    """Fill fresh caches with random numbers in place, because timings on zeros could differ."""

    @partial(jax.jit, donate_argnums=0, static_argnames="place")
    def fill(old: jax.Array, key: jax.Array, place: jax.sharding.Sharding) -> jax.Array:
        drawn = jax.random.normal(key, old.shape, old.dtype)
        return jax.lax.with_sharding_constraint(drawn, place)

    def fill_layer(cache: LayerCache, key: jax.Array) -> LayerCache:
        keys = jax.random.split(key)
        return LayerCache(*(fill(old, k, old.sharding) for old, k in zip(cache.both, keys, strict=True)))

    return [fill_layer(cache, jax.random.key(i)) for i, cache in enumerate(caches)]


def time_parts(
    model: ModelConfig,
    p: Mapping[str, jax.Array],
    caches: Sequence[LayerCache],
    path: AttentionPath,
    matmul: Matmul,
    *,
    n_tokens: int,
    n_rows: int,
    kv_length: int,
    repeat: int,
) -> dict[str, float]:
    """Seconds per part, for `n_rows` requests of `kv_length` tokens with `n_tokens` query tokens in total.

    `caches` are [n_blocks, K, B, D] each and are only read. No iteration may run at the same time.
    """
    dtype = p[TOKEN_EMBEDDING].dtype
    block_size = caches[0].keys.shape[2]
    n_blocks = -(-kv_length // block_size)
    assert n_rows * n_blocks <= caches[0].keys.shape[0]
    layout = FlatLayout(n_tokens, n_rows, n_blocks)
    words = np.zeros(layout.size, np.int32)
    batch = layout.split(words)
    batch.row_start[:] = np.arange(n_rows + 1) * (n_tokens // n_rows)
    batch.kv_length[:] = kv_length
    batch.block_table[:] = np.arange(n_rows * n_blocks).reshape(n_rows, n_blocks)
    host_buffer = HostBuffer(path, last=True)
    flat = FlatBatch(layout, words, batch, n_tokens, n_rows, TokenPrograms())
    buffer = jnp.asarray(host_buffer.fill(flat))
    x = jax.random.normal(jax.random.key(1), (n_tokens, model.hidden_size), dtype)

    def through_experts(y: jax.Array, weight: jax.Array, config: FeedForward) -> jax.Array:
        """Send equally many tokens to each expert: first up, then down."""
        assert config.experts is not None
        n_experts = config.experts.number
        if weight.ndim == 4:
            y = y.repeat(config.experts.top_k, axis=0)
        else:
            y = between(y, config)
        sizes = np.full(n_experts, len(y) // n_experts, np.int32)
        sizes[: len(y) % n_experts] += 1
        return matmul.grouped(y, weight.reshape(n_experts, -1, y.shape[1]), jnp.asarray(sizes))

    @jax.jit
    def linear(p: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
        for i, layer in enumerate(model.layers):
            y, own = x, layer.feed_forward
            for name, parameter in layer_parameters(model, i).items():
                if parameter.use == "expert":
                    assert own is not None
                    y = through_experts(y, p[f"layers.{i}.{name}"], own)
                    if parameter.axes[-1] == "F":
                        x = x + y.reshape(len(x), -1, y.shape[1]).sum(axis=1)
                # The router, whose output has the axis Y, returns no hidden states.
                if parameter.use != "linear" or parameter.axes[0] == "Y":
                    continue
                weight = p[f"layers.{i}.{name}"].reshape(parameter.stacked_shape)
                if parameter.takes_attention and i + 1 == model.n_layers:
                    x, y = x[:n_rows], y[:n_rows]  # from here on the last layer has a token a row
                y = matmul(y[:, : weight.shape[1]], weight)
                if parameter.axes[0] == "F":
                    assert own is not None
                    y = activate(y, own.activation)
                elif parameter.axes[0] == "H":  # as in the model: without the residual, values vanish
                    y = x = x + y
        return x

    @jax.jit
    def attention(qkv: jax.Array, caches: Sequence[LayerCache], buffer: jax.Array) -> jax.Array:
        tables = layout.split(buffer)
        attend = host_buffer.bind(layout, tables, buffer)
        bound = host_buffer.bind_last(layout, tables, buffer)
        for i, cache in enumerate(caches, 1):
            if i == model.n_layers and bound is not None:
                attend, qkv = bound[0], qkv[:n_rows]
            # Each layer's result is the next one's queries, so that no two run concurrently.
            qkv = qkv.at[:, :1].set(attend(qkv, cache, model.attention, None, None))
        return qkv

    head_weight = p[TOKEN_EMBEDDING if model.embedding.tied else HEAD]
    head = jax.jit(lambda x, w: matmul(x, w).astype(jnp.float32))
    heads = x.reshape(n_tokens, 1, model.n_heads, model.head_size)
    qkv = jnp.broadcast_to(heads, (n_tokens, 3, model.n_heads, model.head_size))
    logits = head(x[:n_rows], head_weight)
    choose = jax.jit(greedy)
    return {
        "linear": median(seconds(lambda: linear(p, x), repeat=repeat)),
        "attention": median(seconds(lambda: attention(qkv, caches, buffer), repeat=repeat)),
        "head": median(seconds(lambda: head(x[:n_rows], head_weight), repeat=repeat)),
        "sampler": median(seconds(lambda: choose(logits), repeat=repeat)),
    }
