"""The decoder: an iteration of all layers over a flat batch (ORCA 2, Figure 1; selective batching: 3.2)."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from orca_jax.families.model_config import Layer, ModelConfig, Norm
from orca_jax.families.parameters import Initial, parameter_table
from orca_jax.model.kv_cache import LayerCache, write
from orca_jax.model.layers import LayerNorm, Linear, Matmul, RMSNorm, activate, matmul
from orca_jax.model.shard import ALONE, Shard

Parameters = Mapping[str, jax.Array]


class Attend(Protocol):
    """Split attention with this iteration's tables bound: the one operation that knows of requests."""

    def __call__(self, qkv: jax.Array, cache: LayerCache, /) -> jax.Array:
        """qkv [T, 3, N, D] to [T, N, D]: the queries, with keys and values that the cache has already.

        All three, so that a kernel may read the queries where the product that gave them left them.
        """
        ...


def init_parameters(config: ModelConfig, key: jax.Array, dtype: jnp.dtype) -> dict[str, jax.Array]:
    """Random parameters, of the shapes and initial values in the table of weights."""
    table = parameter_table(config)
    keys = jax.random.split(key, len(table))
    return {
        name: init_parameter(entry.initial, entry.shape, own, dtype)
        for (name, entry), own in zip(table.items(), keys, strict=True)
    }


def init_parameter(initial: Initial, shape: tuple[int, ...], key: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """One parameter."""
    match initial:
        case "ones":
            return jnp.ones(shape, dtype)
        case "zeros":
            return jnp.zeros(shape, dtype)
        case "normal":
            return 0.02 * jax.random.normal(key, shape, dtype)


class Block(nnx.Module):
    """One Transformer layer, of the parts that `config` names."""

    def __init__(self, config: Layer, p: Callable[[str], jax.Array | None]) -> None:
        self.config = config
        self.attn_norm = _norm(config.norm, p, "attn_norm")
        self.qkv = _linear(p, "qkv")
        self.out = _linear(p, "out")
        self.mlp_norm = _norm(config.norm, p, "mlp_norm")
        self.up = _linear(p, "up")
        self.down = _linear(p, "down")

    def __call__(
        self,
        x: jax.Array,
        cache: LayerCache,
        slot_of_token: jax.Array,
        attend: Attend,
        shard: Shard,
        product: Matmul,
    ) -> tuple[jax.Array, LayerCache]:
        """x [T, H] through the layer; this iteration's keys and values are written to the cache first."""

        def attention(value: jax.Array) -> tuple[jax.Array, LayerCache]:
            n_tokens, n_heads = value.shape[0], self.config.attention.n_heads // shard.n
            qkv = self.qkv(value, product)
            qkv = qkv.reshape(n_tokens, 3, n_heads, self.config.attention.head_size)  # [T, 3, N, D]
            written = write(cache, qkv[:, 1], qkv[:, 2], slot_of_token)
            merged = attend(qkv, written).reshape(n_tokens, -1)  # split, attended, merged
            return self.out(merged, product, shard), written

        def feed_forward(value: jax.Array) -> jax.Array:
            inner = activate(self.up(value, product), self.config.feed_forward.activation)
            return self.down(inner, product, shard)

        if self.config.residual == "pre":
            attended, cache = attention(self.attn_norm(x))
            x = x + attended
            return x + feed_forward(self.mlp_norm(x)), cache
        attended, cache = attention(x)
        x = self.attn_norm(x + attended)
        return self.mlp_norm(x + feed_forward(x)), cache


class GPT(nnx.Module):
    """The layers `layers` of the model, by default all; built from named parameters and never changed.

    The first layer brings the embedding with it, the last one the final norm and the head:
    `families.parameters.stage_parameters`. With `shard` each call computes one part, from that part's
    weights; linear layers and the head run `product`.
    """

    def __init__(self, config: ModelConfig, parameters: Parameters, layers: range | None = None) -> None:
        self.config = config
        layers = range(config.n_layers) if layers is None else layers
        first, last = layers.start == 0, layers.stop == config.n_layers
        project = config.embedding.size != config.hidden_size
        if first or (last and config.embedding.tied):
            self.token_embedding = nnx.Param(parameters["token_embedding"])
        if first:
            positions = None if config.positions is None else nnx.Param(parameters["position_embedding"])
            self.position_embedding = positions
            self.project_in = Linear(parameters["project_in"], None) if project else None
        self.layers = nnx.List(
            [Block(config.layers[i], partial(_layer_parameter, parameters, i)) for i in layers]
        )
        if last:
            final = config.final_norm
            self.final_norm = None if final is None else _norm(final, parameters.get, "final_norm")
            self.project_out = Linear(parameters["project_out"], None) if project else None
            self.head = None if config.embedding.tied else Linear(parameters["head.weight"], None)

    def embed(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        shard: Shard = ALONE,
        product: Matmul = matmul,
    ) -> jax.Array:
        """What goes into the first layer: token_ids, positions [T] int32 to [T, H]."""
        table = self.token_embedding[...]  # [V / n, E]
        if shard.n == 1:
            x = table.at[token_ids].get(mode="clip")  # [T, E]
        else:
            here = token_ids - shard.index * table.shape[0]
            mine = (here >= 0) & (here < table.shape[0])
            x = shard.total(jnp.where(mine[:, None], table.at[here].get(mode="clip"), 0))
        if self.project_in is not None:
            x = self.project_in(x, product)
        if self.position_embedding is None or self.config.positions is None:
            return x
        place = positions + self.config.positions.offset
        return x + self.position_embedding[...].at[place].get(mode="clip")

    def through(
        self,
        x: jax.Array,
        slot_of_token: jax.Array,
        caches: list[LayerCache],
        attend: Attend,
        shard: Shard = ALONE,
        product: Matmul = matmul,
    ) -> tuple[jax.Array, list[LayerCache]]:
        """x [T, H] through these layers, with the caches written: slot_of_token [T] int32."""

        # Traced and lowered once for all layers of a kind; XLA inlines the calls, so that the program is the
        # same. Calls that it is told to keep (jax.Inline.XLA_LATE) are compiled one by one, and not fused.
        @partial(jax.jit, static_argnums=0)
        def layer(
            graph: nnx.GraphDef[Block], weights: nnx.State, x: jax.Array, cache: LayerCache
        ) -> tuple[jax.Array, LayerCache]:
            return nnx.merge(graph, weights)(x, cache, slot_of_token, attend, shard, product)

        written: list[LayerCache] = []
        for block, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(*nnx.split(block), x, cache)
            written.append(cache)
        return x, written

    def logits(
        self,
        x: jax.Array,
        last_token_index: jax.Array,
        shard: Shard = ALONE,
        product: Matmul = matmul,
    ) -> jax.Array:
        """What the last layer leaves, x [T, H]: the logits [R, V] float32 that follow each row's last token.

        last_token_index is [R] int32.
        """
        x = x.at[last_token_index].get(mode="clip")  # [R, H]: only a row's last token has a next one
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.project_out is not None:
            x = self.project_out(x, product)
        head = self.token_embedding if self.head is None else self.head.weight
        logits = shard.side_by_side(product(x, head[...]))[:, : self.config.vocab_size]
        return logits.astype(jnp.float32)


def _layer_parameter(parameters: Parameters, layer: int, name: str) -> jax.Array | None:
    return parameters.get(f"layers.{layer}.{name}")


def _norm(norm: Norm, p: Callable[[str], jax.Array | None], name: str) -> LayerNorm | RMSNorm:
    scale, bias = p(f"{name}.scale"), p(f"{name}.bias")
    assert scale is not None, name
    if norm.kind == "rms_norm":
        return RMSNorm(scale, norm.eps)
    assert bias is not None, name
    return LayerNorm(scale, bias, norm.eps)


def _linear(p: Callable[[str], jax.Array | None], name: str) -> Linear:
    weight = p(f"{name}.weight")
    assert weight is not None, name
    return Linear(weight, p(f"{name}.bias"))
