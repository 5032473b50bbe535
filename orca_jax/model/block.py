"""One Transformer layer: attention and feed-forward, joined by the residual form that its config names."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from orca_jax.families.model_config import Layer, Residual
from orca_jax.model.context import Context, Iteration
from orca_jax.model.cross_attention import CrossAttention
from orca_jax.model.feed_forward import FeedForward
from orca_jax.model.kv_cache import LayerCache
from orca_jax.model.latent import LatentAttention
from orca_jax.model.layers import LayerNorm, RMSNorm, Weights, norm_of
from orca_jax.model.mixture import Mixture
from orca_jax.model.rotation import Rotation
from orca_jax.model.self_attention import SelfAttention

Parameters = Mapping[str, Any]  # arrays and FormedWeights by name


def weights_of_layer(parameters: Parameters, layer: int) -> Weights:
    """Looks up the parameters of one layer by their names in it."""
    return lambda name: parameters.get(f"layers.{layer}.{name}")


class Block(nnx.Module):
    """One Transformer layer, made of the parts that `config` names."""

    attn_norm: LayerNorm | RMSNorm
    attn_out_norm: LayerNorm | RMSNorm
    mlp_norm: LayerNorm | RMSNorm
    mlp_out_norm: LayerNorm | RMSNorm
    cross_norm: LayerNorm | RMSNorm

    def __init__(self, config: Layer, p: Weights) -> None:
        self.config = config
        for name in config.norms:
            setattr(self, name, norm_of(config.norm, p, name))
        self.attention = (LatentAttention if config.attention.latent else SelfAttention)(config.attention, p)
        self.cross = None if config.cross is None else CrossAttention(config.cross, p)
        self.feed_forward = (Mixture if config.feed_forward.experts else FeedForward)(config.feed_forward, p)

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        """[T, H] to [T, H], or to [R, H] where only R tokens leave the layer.

        Keys and values of all tokens are written to `ctx.cache` first, unless there are no slots.
        """
        return ctx.whole(_RESIDUAL_FORMS[self.config.residual](self, x, ctx))

    def scaled(self, x: jax.Array) -> jax.Array:
        """x times the residual multiplier."""
        multiplier = self.config.residual_multiplier
        return x if multiplier == 1.0 else x * jnp.asarray(multiplier, x.dtype)


def _pre(block: Block, x: jax.Array, ctx: Context) -> jax.Array:
    attended = block.scaled(block.attention(block.attn_norm(x), ctx))
    x = ctx.wanted(x) + attended
    if block.cross is not None:
        x = x + block.scaled(block.cross(block.cross_norm(x), ctx))
    return x + block.scaled(block.feed_forward(block.mlp_norm(x), ctx))


def _post(block: Block, x: jax.Array, ctx: Context) -> jax.Array:
    attended = block.scaled(block.attention(x, ctx))
    x = block.attn_norm(ctx.wanted(x) + attended)
    if block.cross is not None:
        x = block.cross_norm(x + block.scaled(block.cross(x, ctx)))
    return block.mlp_norm(x + block.scaled(block.feed_forward(x, ctx)))


def _both(block: Block, x: jax.Array, ctx: Context) -> jax.Array:
    attended = block.scaled(block.attn_out_norm(block.attention(block.attn_norm(x), ctx)))
    x = ctx.wanted(x) + attended
    return x + block.scaled(block.mlp_out_norm(block.feed_forward(block.mlp_norm(x), ctx)))


def _after(block: Block, x: jax.Array, ctx: Context) -> jax.Array:
    attended = block.scaled(block.attn_out_norm(block.attention(x, ctx)))
    x = ctx.wanted(x) + attended
    return x + block.scaled(block.mlp_out_norm(block.feed_forward(x, ctx)))


def _parallel(block: Block, x: jax.Array, ctx: Context) -> jax.Array:
    normed = block.attn_norm(x)
    attended = block.scaled(block.attention(normed, ctx))
    x = ctx.wanted(x)
    fed = block.scaled(block.feed_forward(ctx.wanted(normed), ctx))
    return x + attended + fed


def _parallel_two_norms(block: Block, x: jax.Array, ctx: Context) -> jax.Array:
    attended = block.scaled(block.attention(block.attn_norm(x), ctx))
    x = ctx.wanted(x)
    fed = block.scaled(block.feed_forward(block.mlp_norm(x), ctx))
    return x + attended + fed


_RESIDUAL_FORMS: Mapping[Residual, Callable[[Block, jax.Array, Context], jax.Array]] = {
    "pre": _pre,
    "post": _post,
    "both": _both,
    "after": _after,
    "parallel": _parallel,
    "parallel_two_norms": _parallel_two_norms,
}


class LayerOutput(NamedTuple):
    """A layer's outputs: hidden states, updated cache, chosen experts."""

    x: jax.Array  # [T, H] or [R, H]
    cache: LayerCache
    chosen: jax.Array | None  # [T, k] or [R, k] int32; None without experts


RunBlock = Callable[[Block, bool, jax.Array, LayerCache, Rotation | None], LayerOutput]


def run_blocks(iteration: Iteration) -> RunBlock:
    """Make a function that runs blocks in this iteration; its flag lets only wanted tokens leave the block.

    Equal blocks are traced and lowered once. XLA inlines the calls, so the compiled program is the same. It
    would compile calls that are kept (jax.Inline.XLA_LATE) one by one, and not fuse across them.
    """

    @partial(jax.jit, static_argnums=(0, 1))
    def layer(
        graph: nnx.GraphDef[Block],
        only_wanted: bool,
        weights: nnx.State,
        x: jax.Array,
        cache: LayerCache,
        rotation: Rotation | None,
    ) -> LayerOutput:
        block = nnx.merge(graph, weights)
        ctx = iteration.context(block.config, x, cache, rotation, only_wanted=only_wanted)
        return LayerOutput(block(x, ctx), ctx.cache, ctx.chosen)

    def run(
        block: Block, only_wanted: bool, x: jax.Array, cache: LayerCache, rotation: Rotation | None
    ) -> LayerOutput:
        graph, weights = nnx.split(block)
        return layer(graph, only_wanted, weights, x, cache, rotation)

    return run
