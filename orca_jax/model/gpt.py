"""The GPT: one iteration of all layers over a flat batch (ORCA 2, Figure 1; 3.2 for selective batching)."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from orca_jax.config import ModelConfig
from orca_jax.model.kv_cache import LayerCache, write
from orca_jax.model.layers import LayerNorm, Linear, activate, matmul

Parameters = Mapping[str, jax.Array]


class Attend(Protocol):
    """Split attention with this iteration's tables bound: the one operation that knows of requests."""

    def __call__(self, q: jax.Array, cache: LayerCache, /) -> jax.Array:
        """q [T, N, D] to [T, N, D]."""
        ...


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter; linear weights are [out, in]. The one truth of both."""
    c, h = config, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedding": (c.padded_vocab_size, c.embedding_size),
        "position_embedding": (c.n_positions + c.position_offset, h),
    }
    if c.embedding_size != h:
        shapes |= {"project_in": (h, c.embedding_size), "project_out": (c.embedding_size, h)}

    def norm(name: str) -> None:
        shapes[f"{name}.scale"] = shapes[f"{name}.bias"] = (h,)

    for i in range(c.n_layers):
        for name, out, into in (
            ("qkv", 3 * h, h),
            ("out", h, h),
            ("up", c.ffn_size, h),
            ("down", h, c.ffn_size),
        ):
            shapes[f"layers.{i}.{name}.weight"] = (out, into)
            if c.use_bias:
                shapes[f"layers.{i}.{name}.bias"] = (out,)
        norm(f"layers.{i}.attn_norm")
        norm(f"layers.{i}.mlp_norm")
    if c.final_norm:
        norm("final_norm")
    if not c.tie_embeddings:
        shapes["head.weight"] = (c.padded_vocab_size, c.embedding_size)
    return shapes


def init_parameters(config: ModelConfig, key: jax.Array, dtype: jnp.dtype) -> dict[str, jax.Array]:
    """Random parameters as GPT-2 was initialised: normal with deviation 0.02, norms at 1 and 0."""
    shapes = parameter_shapes(config)
    parameters = {}
    for name, one in zip(shapes, jax.random.split(key, len(shapes)), strict=True):
        if name.endswith(".scale"):
            parameters[name] = jnp.ones(shapes[name], dtype)
        elif name.endswith(".bias"):
            parameters[name] = jnp.zeros(shapes[name], dtype)
        else:
            parameters[name] = 0.02 * jax.random.normal(one, shapes[name], dtype)
    return parameters


class Block(nnx.Module):
    """One Transformer layer, with its norms before attention and feed-forward, or after (OPT-350m)."""

    def __init__(self, config: ModelConfig, p: Callable[[str], jax.Array | None]) -> None:
        self.config = config
        self.attn_norm = _norm(config, p, "attn_norm")
        self.qkv = _linear(p, "qkv")
        self.out = _linear(p, "out")
        self.mlp_norm = _norm(config, p, "mlp_norm")
        self.up = _linear(p, "up")
        self.down = _linear(p, "down")

    def __call__(
        self, x: jax.Array, cache: LayerCache, slot_of_token: jax.Array, attend: Attend
    ) -> tuple[jax.Array, LayerCache]:
        """x [T, H] through the layer; this iteration's keys and values are written to the cache first."""
        pre = self.config.norm == "pre"

        def attention(value: jax.Array) -> tuple[jax.Array, LayerCache]:
            shape = (value.shape[0], 3, self.config.n_heads, self.config.head_size)
            qkv = self.qkv(value).reshape(shape)  # [T, 3, N, D]
            written = write(cache, qkv[:, 1], qkv[:, 2], slot_of_token)
            merged = attend(qkv[:, 0], written).reshape(value.shape)  # split, attended, merged
            return self.out(merged), written

        def feed_forward(value: jax.Array) -> jax.Array:
            return self.down(activate(self.up(value), self.config.activation))

        if pre:
            attended, cache = attention(self.attn_norm(x))
            x = x + attended
            return x + feed_forward(self.mlp_norm(x)), cache
        attended, cache = attention(x)
        x = self.attn_norm(x + attended)
        return self.mlp_norm(x + feed_forward(x)), cache


class GPT(nnx.Module):
    """The whole model; built from named parameters and never changed."""

    def __init__(self, config: ModelConfig, parameters: Parameters) -> None:
        self.config = config
        self.token_embedding = nnx.Param(parameters["token_embedding"])
        self.position_embedding = nnx.Param(parameters["position_embedding"])
        project = config.embedding_size != config.hidden_size
        self.project_in = Linear(parameters["project_in"], None) if project else None
        self.project_out = Linear(parameters["project_out"], None) if project else None
        self.layers = nnx.List(
            [Block(config, partial(_layer_parameter, parameters, i)) for i in range(config.n_layers)]
        )
        self.final_norm = _norm(config, parameters.get, "final_norm") if config.final_norm else None
        self.head = None if config.tie_embeddings else Linear(parameters["head.weight"], None)

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        slot_of_token: jax.Array,
        last_token_index: jax.Array,
        caches: list[LayerCache],
        attend: Attend,
    ) -> tuple[jax.Array, list[LayerCache]]:
        """One iteration: token_ids, positions, slot_of_token [T] int32; last_token_index [R] int32.

        Returns the logits [R, V] float32 that follow each row's last token, and the written caches.
        """
        x = self.token_embedding[...].at[token_ids].get(mode="clip")  # [T, E]
        if self.project_in is not None:
            x = self.project_in(x)
        place = positions + self.config.position_offset
        x = x + self.position_embedding[...].at[place].get(mode="clip")  # [T, H]
        written: list[LayerCache] = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, cache, slot_of_token, attend)
            written.append(cache)
        x = x.at[last_token_index].get(mode="clip")  # [R, H]: only a row's last token has a next one
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.project_out is not None:
            x = self.project_out(x)
        head = self.token_embedding if self.head is None else self.head.weight
        logits = matmul(x, head[...])[:, : self.config.vocab_size]
        return logits.astype(jnp.float32), written


def _layer_parameter(parameters: Parameters, layer: int, name: str) -> jax.Array | None:
    return parameters.get(f"layers.{layer}.{name}")


def _norm(config: ModelConfig, p: Callable[[str], jax.Array | None], name: str) -> LayerNorm:
    scale, bias = p(f"{name}.scale"), p(f"{name}.bias")
    assert scale is not None and bias is not None, name
    return LayerNorm(scale, bias, config.layer_norm_eps)


def _linear(p: Callable[[str], jax.Array | None], name: str) -> Linear:
    weight = p(f"{name}.weight")
    assert weight is not None, name
    return Linear(weight, p(f"{name}.bias"))
