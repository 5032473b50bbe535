"""One layer: attention or a recurrent mixer, and feed-forward, in the residual form that its config names.

A layer may have one of the two parts alone.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from orca_jax.families.model_config import Layer, Residual
from orca_jax.families.recurrence_config import GatedDeltaNet, Mamba2, Recurrence, ShortConvolution
from orca_jax.model.context import Beside, Context, Iteration
from orca_jax.model.cross_attention import CrossAttention
from orca_jax.model.feed_forward import FeedForward, activate
from orca_jax.model.gated_delta_net import GatedDeltaNetMixer
from orca_jax.model.kv_cache import LayerMemory
from orca_jax.model.latent import LatentAttention
from orca_jax.model.layers import LayerNorm, RMSNorm, Weights, linear_of, norm_of
from orca_jax.model.mamba2 import Mamba2Mixer
from orca_jax.model.mixture import Mixture
from orca_jax.model.rotation import Rotation
from orca_jax.model.self_attention import SelfAttention
from orca_jax.model.short_convolution import ShortConvolutionMixer

Parameters = Mapping[str, Any]  # arrays and FormedWeights by name
Mixer = ShortConvolutionMixer | GatedDeltaNetMixer | Mamba2Mixer


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
    mlp_mid_norm: LayerNorm | RMSNorm
    experts_norm: LayerNorm | RMSNorm
    experts_out_norm: LayerNorm | RMSNorm
    input_norm: LayerNorm | RMSNorm

    def __init__(self, config: Layer, p: Weights) -> None:
        self.config = config
        for name in config.norms:
            setattr(self, name, norm_of(config.norm, p, name))
        self.recurrence = None if config.recurrence is None else recurrent_mixer(config.recurrence, p)
        if (attention := config.attention) is not None:
            self.attention = (LatentAttention if attention.latent else SelfAttention)(attention, p)
        self.cross = None if config.cross is None else CrossAttention(config.cross, p)
        if (feed_forward := config.feed_forward) is not None:
            self.feed_forward = (Mixture if feed_forward.experts else FeedForward)(feed_forward, p)
        self.beside = None if config.beside is None else Mixture(config.beside, p)
        if config.input_size is not None:
            self.input_gate, self.input_out = linear_of(p, "input_gate"), linear_of(p, "input_out")
        self.scalar = nnx.Param(p("scalar")) if config.scalar else None

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        """[T, H] to [T, H], or to [R, H] where only R tokens leave the layer.

        Keys and values of all tokens are written to `ctx.cache` first, unless there are no slots.
        """
        form = _RESIDUAL_FORMS[self.config.residual] if self.config.attention else _without_attention
        form = _both_mixers if self.config.has_both else form
        return ctx.whole(self._ended(form(self, x, ctx), ctx))

    def fed(self, x: jax.Array, ctx: Context) -> jax.Array:
        """The sum after the feed-forward in the form `pre`; x itself in a layer that has none."""
        if self.config.feed_forward is None:
            return x
        return x + self.scaled(self.feed_forward(self.mlp_norm(x), ctx))

    def _ended(self, x: jax.Array, ctx: Context) -> jax.Array:
        """Add the layer's own input and multiply by its learned factor, where it has them."""
        feed_forward = self.config.feed_forward
        if self.config.input_size is not None and feed_forward is not None:
            assert ctx.layer_input is not None
            gate = activate(self.input_gate(x, ctx.product), feed_forward.activation)
            x = x + self.input_norm(self.input_out(gate * ctx.wanted(ctx.layer_input), ctx.product))
        return x if self.scalar is None else x * self.scalar[...]

    def scaled(self, x: jax.Array) -> jax.Array:
        """x times the residual multiplier."""
        multiplier = self.config.residual_multiplier
        return x if multiplier == 1.0 else x * jnp.asarray(multiplier, x.dtype)


def recurrent_mixer(config: Recurrence, p: Weights) -> Mixer:
    """The mixer of a recurrent layer: [T, H] to [T, H], through the context's `rows` and `state`."""
    match config:
        case ShortConvolution():
            return ShortConvolutionMixer(config, p)
        case GatedDeltaNet():
            return GatedDeltaNetMixer(config, p)
        case Mamba2():
            return Mamba2Mixer(config, p)


def _without_attention(block: Block, x: jax.Array, ctx: Context) -> jax.Array:
    """The form `pre` with a recurrent mixer, or of a feed-forward alone.

    A mixer needs all tokens, also those that do not leave the layer. Where there are no slots the tokens have
    been through the mixer, and x is the sum after it: a state cannot take a token a second time.
    """
    if block.recurrence is not None and ctx.slot_of_token is not None:
        x = x + block.scaled(block.recurrence(block.attn_norm(x), ctx))
        ctx.mixed = x
    return block.fed(ctx.wanted(x), ctx)


def _both_mixers(block: Block, x: jax.Array, ctx: Context) -> jax.Array:
    """The form `pre` with attention and a recurrent mixer side by side.

    The mixer needs all tokens. Where there are no slots it has seen them, and its results are in the context.
    """
    config, normed = block.config, block.attn_norm(x)
    if block.recurrence is not None and ctx.slot_of_token is not None:
        mixed = block.recurrence(normed, ctx)
        ctx.mixed = mixed * jnp.asarray(config.recurrence_multiplier, x.dtype)
    assert ctx.mixed is not None
    attended = block.attention(normed, ctx) * jnp.asarray(config.attention_multiplier, x.dtype)
    return block.fed(ctx.wanted(x) + block.scaled(attended + ctx.wanted(ctx.mixed)), ctx)


def _pre(block: Block, x: jax.Array, ctx: Context) -> jax.Array:
    attended = block.scaled(block.attention(block.attn_norm(x), ctx))
    x = ctx.wanted(x) + attended
    if block.cross is not None:
        x = x + block.scaled(block.cross(block.cross_norm(x), ctx))
    return block.fed(x, ctx)


def _bare(block: Block, x: jax.Array, ctx: Context) -> jax.Array:
    return block.fed(ctx.wanted(x) + block.scaled(block.attention(x, ctx)), ctx)


def _joined(block: Block, x: jax.Array, ctx: Context) -> jax.Array:
    """The form of an EAGLE-3 head, whose attention takes embeddings joined with x (read_states.py)."""
    assert ctx.layer_input is not None
    return block.fed(ctx.wanted(x) + block.scaled(block.attention(ctx.layer_input, ctx)), ctx)


def _post(block: Block, x: jax.Array, ctx: Context) -> jax.Array:
    attended = block.scaled(block.attention(x, ctx))
    x = block.attn_norm(ctx.wanted(x) + attended)
    if block.cross is not None:
        x = block.cross_norm(x + block.scaled(block.cross(x, ctx)))
    return block.mlp_norm(x + block.scaled(block.feed_forward(x, ctx)))


def _both(block: Block, x: jax.Array, ctx: Context) -> jax.Array:
    attended = block.scaled(block.attn_out_norm(block.attention(block.attn_norm(x), ctx)))
    x = ctx.wanted(x) + attended
    fed = block.feed_forward(block.mlp_norm(x), ctx)
    if block.beside is not None:
        beside = block.experts_out_norm(block.beside(block.experts_norm(x), ctx, x))
        fed = block.mlp_mid_norm(fed) + beside
    return x + block.scaled(block.mlp_out_norm(fed))


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
    "bare": _bare,
    "post": _post,
    "both": _both,
    "after": _after,
    "parallel": _parallel,
    "parallel_two_norms": _parallel_two_norms,
    "joined": _joined,
}


class LayerOutput(NamedTuple):
    """A layer's outputs: hidden states, updated cache, chosen experts."""

    x: jax.Array  # [T, H] or [R, H]
    cache: LayerMemory
    chosen: jax.Array | None  # [T, k] or [R, k] int32; None without experts
    # [T, H] a recurrent layer's sum after its mixer, if only R tokens leave the layer
    mixed: jax.Array | None = None
    selected: jax.Array | None = None  # [T, top_k] keys that its indexer selects, or that it was given


# The block, whether only wanted tokens leave it, x, its cache, its rotation, and what it is given beside x.
RunBlock = Callable[[Block, bool, jax.Array, LayerMemory, Rotation | None, Beside], LayerOutput]


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
        cache: LayerMemory,
        rotation: Rotation | None,
        beside: Beside,
    ) -> LayerOutput:
        block = nnx.merge(graph, weights)
        ctx = iteration.context(block.config, x, cache, rotation, beside, only_wanted=only_wanted)
        out = block(x, ctx)
        mixed = ctx.mixed if only_wanted else None
        return LayerOutput(out, ctx.held, ctx.chosen, mixed, ctx.selected)

    def run(
        block: Block,
        only_wanted: bool,
        x: jax.Array,
        cache: LayerMemory,
        rotation: Rotation | None,
        beside: Beside,
    ) -> LayerOutput:
        graph, weights = nnx.split(block)
        return layer(graph, only_wanted, weights, x, cache, rotation, beside)

    return run
