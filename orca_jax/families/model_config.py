"""The shape of a model, composed of small parts, each checked when it is made.

A part says what a block of the model computes. A new kind of block is a new value of a field, or a new field
whose default is today's computation. A part raises a ConfigError for a combination that is not computed.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Literal

from orca_jax.checks import check_whole
from orca_jax.config import Pooling
from orca_jax.errors import ConfigError
from orca_jax.families.attention_config import Attention, KVCode, Latent, Scores
from orca_jax.families.limits import check_choice, check_positive, check_size
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.mixtures.mxfp4 import BLOCK
from orca_jax.families.norm_config import Norm
from orca_jax.families.recurrence_config import Recurrence
from orca_jax.families.rotary import Rotary
from orca_jax.families.weight_form import Dense, Forms, WeightForm

Activation = Literal["gelu_tanh", "gelu", "relu", "silu", "relu2", "xielu"]
Residual = Literal["pre", "post", "both", "after", "parallel", "parallel_two_norms", "joined", "bare"]
# The formula of a head that drafts: DeepSeek-V3's next-token layer, or EAGLE-3.
HeadKind = Literal["next_token", "eagle3"]

LAYER_NORM = Norm()
_FIXED = (
    "weights cannot be replaced while experts are packed in MXFP4; load the model without "
    'load_format="packed"'
)
SELECTED_DIGITS = 3  # a selected key's position, in digits of 256, which elements of any dtype hold exactly
_LAYER = re.compile(r"(encoder\.)?layers\.\d+\.")
# The names of a layer's norms by the form of its residual.
_NORMS: dict[str, tuple[str, ...]] = {
    "pre": ("attn_norm", "mlp_norm"),
    "bare": ("mlp_norm",),
    "post": ("attn_norm", "mlp_norm"),
    "both": ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm"),
    "after": ("attn_out_norm", "mlp_out_norm"),
    "parallel": ("attn_norm",),
    "parallel_two_norms": ("attn_norm", "mlp_norm"),
    "joined": ("mlp_norm",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForward:
    """Two linear layers with an activation function between them; `size` is the width between them.

    With `gated` the first layer has two outputs of that width, and the second takes activation(gate) * up. A
    `gate_limit` clips gate from above and up on both sides, and then the second takes gate * sigmoid(1.702
    gate) * (up + 1), whatever the activation (gpt-oss). With `experts` there are many such pairs of layers.
    The activation `relu2` is relu(x) ** 2; `xielu` has numbers that are learned (Apertus). The gate before
    its activation is multiplied by `gate_multiplier`, the result by `multiplier` (Falcon-H1).
    """

    size: int
    activation: Activation = "gelu_tanh"
    gated: bool = False
    bias: bool = True
    gate_limit: float | None = None
    experts: Experts | None = None
    gate_multiplier: float = 1.0
    multiplier: float = 1.0

    def __post_init__(self) -> None:
        check_size("ffn_size", self.size)
        check_positive("gate_multiplier", self.gate_multiplier)
        check_positive("ffn_multiplier", self.multiplier)
        if (self.gate_multiplier, self.multiplier) != (1.0, 1.0) and (
            self.experts is not None or not self.gated or self.gate_limit is not None
        ):
            raise ConfigError("multipliers of a feed-forward that is not gated, or has experts, or a limit")
        check_choice("activation", self.activation, Activation)
        if self.gate_limit is not None:
            check_positive("gate_limit", self.gate_limit)
            if not self.gated:
                raise ConfigError("gate_limit is set, but the layer is not gated")
        if self.experts is not None and self.experts.latent_size is not None and self.bias:
            raise ConfigError("biases of experts in a latent space are not supported")
        if self.experts is not None and self.experts.weighs_inputs and self.bias:
            raise ConfigError("biases of experts whose inputs are weighted are not supported")
        if self.activation == "xielu" and (self.gated or self.experts is not None):
            raise ConfigError("the activation xielu in a layer that is gated or has experts is not supported")

    @property
    def is_plain(self) -> bool:
        """Whether it computes down (silu(gate) * up), weighted, without biases and with dense weights."""
        packed = self.experts is not None and (self.experts.packed or self.experts.weighs_inputs)
        plain = self.gated and self.activation == "silu" and self.gate_limit is None
        return plain and not self.bias and not packed


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A Transformer layer: f is attention, then feed-forward. `residual` says where the norms are.

    pre: x + f(norm(x)); bare: pre, but attention takes x itself, as in ModernBERT's first layer, whose
    embedding has a norm; post: norm(x + f(x)); both: x + norm(f(norm(x))); after: x + norm(f(x)). parallel: x
    + attention(norm(x)) + feed_forward(norm(x)) with one norm, or with `parallel_two_norms` one for each.
    joined, in a head alone (`ReadStates`): pre, but attention takes an input of 2 H elements in place of
    norm(x). The result of f is multiplied by `residual_multiplier` before the sum. With `cross`, which pre
    and post allow, attention to the encoder's states comes between the two, with `cross_norm`. `forms` says
    how devices hold its weights.

    With a `recurrence` the layer mixes tokens through a state of fixed size, mostly without attention. With
    both, and the residual `pre`, each takes the same normalised x, and their results are multiplied by
    `attention_multiplier` and `recurrence_multiplier` before the sum (Falcon-H1). A layer
    with the residual `pre` may have one part alone: attention or a recurrence, or a feed-forward
    (Nemotron-H).

    Three parts are Gemma 4's. Experts `beside` a dense feed-forward, with the residual `both`, take the sum
    before it: f is then norm(feed_forward(norm(x))) + norm(beside(norm(x))). With an `input_size` the layer
    has an input of so many elements for each token (`ModelConfig.input_size`): x + norm(out(activation(gate
    x) * input)) follows. With a `scalar` its result is multiplied by a number that is learned.
    """

    attention: Attention | None
    feed_forward: FeedForward | None
    norm: Norm = LAYER_NORM
    residual: Residual = "pre"
    residual_multiplier: float = 1.0
    cross: Attention | None = None
    forms: Forms = ()
    recurrence: Recurrence | None = None
    beside: FeedForward | None = None
    input_size: int | None = None
    scalar: bool = False
    attention_multiplier: float = 1.0
    recurrence_multiplier: float = 1.0

    def __post_init__(self) -> None:
        check_choice("residual", self.residual, Residual)
        for name in ("attention_multiplier", "recurrence_multiplier"):
            check_positive(name, getattr(self, name))
        if (self.attention_multiplier, self.recurrence_multiplier) != (1.0, 1.0) and not self.has_both:
            raise ConfigError("multipliers of a layer without both attention and a recurrence")
        if self.has_both and self.attention is not None and self.attention.latent is not None:
            raise ConfigError("latent attention beside a recurrence is not supported")
        if not self.mixes and self.feed_forward is None:
            raise ConfigError("a layer needs attention, a recurrence or a feed-forward")
        if self.recurrence is not None or self.attention is None or self.feed_forward is None:
            self._check_rare()
        check_positive("residual_multiplier", self.residual_multiplier)
        if self.beside is not None:
            own = self.feed_forward
            mixed = own is None or own.experts is not None or self.beside.experts is None
            if mixed or self.residual != "both":
                raise ConfigError(
                    "experts beside a feed-forward need the residual both, and a dense feed-forward"
                )
        if self.input_size is not None:
            check_size("input_size", self.input_size)
            if self.feed_forward is None:
                raise ConfigError("an input of a layer without a feed-forward is not supported")
        if self.cross is None:
            return
        if self.residual not in ("pre", "post"):
            raise ConfigError(f"residual is {self.residual!r}; with cross attention it must be pre or post")
        self._check_cross(self.cross)

    def _check_rare(self) -> None:
        """Raise ConfigError unless the residual's form has layers of one part, or with a recurrence."""
        if self.residual != "pre" or self.cross is not None:
            kind = "with a recurrence" if self.recurrence is not None else "of one part"
            raise ConfigError(
                f"residual is {self.residual!r} in a layer {kind}; only pre is supported, without "
                "cross attention"
            )

    @staticmethod
    def _check_cross(cross: Attention) -> None:
        scores = cross.scores
        if (
            cross.causal
            or (cross.rotary, cross.qk_norm) != (None, None)
            or scores != Scores(scale=scores.scale)
        ):
            raise ConfigError("cross attention that is causal, or knows positions, is not supported")

    @property
    def norms(self) -> tuple[str, ...]:
        """The names of its norms, all of the kind `norm`."""
        if not self.mixes:
            return ("mlp_norm",)
        if self.feed_forward is None:
            return ("attn_norm",)
        return (
            *_NORMS[self.residual],
            *(() if self.cross is None else ("cross_norm",)),
            *(() if self.beside is None else ("mlp_mid_norm", "experts_norm", "experts_out_norm")),
            *(() if self.input_size is None else ("input_norm",)),
        )

    @property
    def mixes(self) -> bool:
        """Whether it mixes tokens, by attention or a recurrence; otherwise it is a feed-forward alone."""
        return self.attention is not None or self.recurrence is not None

    @property
    def has_both(self) -> bool:
        """Whether it mixes tokens by attention and a recurrence side by side."""
        return self.attention is not None and self.recurrence is not None

    @property
    def experts(self) -> Experts | None:
        """The experts of its feed-forward, or beside it; None if it has none."""
        sparse = self.sparse
        return None if sparse is None else sparse.experts

    @property
    def sparse(self) -> FeedForward | None:
        """The feed-forward that has experts, if any has."""
        if self.beside is not None:
            return self.beside
        own = self.feed_forward
        return None if own is None or own.experts is None else own

    @property
    def rotary(self) -> Rotary | None:
        """The rotary positions of its attention; None without them, or without attention."""
        return None if self.attention is None else self.attention.rotary

    @property
    def takes_selection(self) -> bool:
        """Whether its queries see the keys that an earlier layer's indexer has selected."""
        indexer = None if self.attention is None else self.attention.indexer
        return indexer is not None and indexer.shared

    @property
    def has_whole_experts(self) -> bool:
        """Whether devices hold whole experts, whatever their size, because an expert is not dense."""
        own = self.experts
        return own is not None and (own.packed or any(name.startswith("experts.") for name, _ in self.forms))

    def with_attention(self, **changes: Any) -> "Layer":
        """The same layer with these fields of its attention changed."""
        assert self.attention is not None
        return replace(self, attention=replace(self.attention, **changes))

    def with_feed_forward(self, **changes: Any) -> "Layer":
        """The same layer with these fields of its feed-forward changed."""
        assert self.feed_forward is not None
        return replace(self, feed_forward=replace(self.feed_forward, **changes))

    def with_window(self, window: int | None) -> "Layer":
        """The same layer whose attention has this window."""
        assert self.attention is not None
        return self.with_attention(scores=replace(self.attention.scores, window=window))

    def with_kv_heads(self, repeats: int) -> "Layer":
        """The same layer with each K/V head of the checkpoint `repeats` times in a row."""
        if self.attention is None:
            return self
        cross = None if self.cross is None else self.cross.repeated(repeats)
        return replace(self, attention=self.attention.repeated(repeats), cross=cross)

    def with_kv_code(self, code: KVCode) -> "Layer":
        """The same layer whose cache, if it has attention, holds keys and values in eight bits."""
        if self.attention is None:
            return self
        cross = None if self.cross is None else replace(self.cross, kv_code=code)
        return replace(self.with_attention(kv_code=code), cross=cross)


def alike(layer: Layer, n_layers: int) -> tuple[Layer, ...]:
    """Repeat a layer `n_layers` times. Raises ConfigError for an impossible number."""
    check_size("n_layers", n_layers)
    return (layer,) * n_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedPositions:
    """A table with a row for each position; `offset` is added to a position first (OPT: 2)."""

    offset: int = 0

    def __post_init__(self) -> None:
        check_whole("position_offset", self.offset, 0, 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    """The token embedding. Where `size` is not the hidden size, there are projections around the layers.

    With `tied` the head has the same weights. A token's row is multiplied by `multiplier`, rounded to the
    weights' dtype; `norm` follows the sum with the position (BLOOM). With `n_segments` there is a table with
    a row for each segment of an input (BERT). Each token `separator` ends one; without it there is only one.
    """

    size: int
    tied: bool = True
    multiplier: float = 1.0
    norm: Norm | None = None
    n_segments: int = 0
    separator: int | None = None

    def __post_init__(self) -> None:
        check_size("embedding_size", self.size)
        check_whole("type_vocab_size", self.n_segments, 0, 1 << 10)
        check_positive("embedding_multiplier", self.multiplier)


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """The encoder of a model's input: layers without causal masks, for at most `n_positions` tokens.

    It shares the decoder's token embedding, and has its own positions and norms.
    """

    layers: tuple[Layer, ...]
    n_positions: int
    positions: LearnedPositions | None = None
    embedding_norm: Norm | None = None
    final_norm: Norm | None = None

    def __post_init__(self) -> None:
        check_size("encoder_positions", self.n_positions)
        check_size("n_layers", len(self.layers))
        for layer in self.layers:
            if layer.attention is None or layer.attention.causal or layer.cross is not None:
                raise ConfigError(
                    "an encoder's layer that is causal, recurrent, or has cross attention, is not supported"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadStates:
    """The hidden states of a served model that a head reads to draft its next tokens.

    For each token they are the inputs of the served model's `layers`, side by side, `size` elements each; its
    number of layers stands for the last layer's output after the final norm. The head computes a token from
    its embedding e and the states s of the token before it, or its own output where it has drafted that.

    next_token (DeepSeek-V3, equation 21): the first layer's input x is project [norm(e); norm(s)]. eagle3 (Li
    et al., 2025): x is project s, or the head's own output, and attention takes [norm(e); norm(x)]; with
    `norm_first` x is normalised before the residual too, with `norm_states` s is. With `norm_output` a head
    of either kind goes on from its output after the final norm.

    It may draft only some tokens: then it has logits of `n_drafted` tokens, whose ids are weights. With
    `shares_embedding` it has the served model's token embedding, with `shares_head` that model's head; they
    are not among its weights.
    """

    layers: tuple[int, ...]
    size: int
    kind: HeadKind = "next_token"
    norm_first: bool = False
    norm_states: bool = False
    norm_output: bool = False
    n_drafted: int | None = None
    shares_embedding: bool = False
    shares_head: bool = False

    def __post_init__(self) -> None:
        check_size("hidden_size", self.size)
        check_choice("kind of head", self.kind, HeadKind)
        check_whole("layers that a head reads", len(self.layers), 1, 3)
        if self.n_drafted is not None:
            check_size("vocab_size", self.n_drafted)

    @property
    def width(self) -> int:
        """Elements of a token's states."""
        return len(self.layers) * self.size


RankerKind = Literal["pooler", "linear", "tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankerHead:
    """The head with which a ranker computes the relevance of two texts from a pooled state.

    pooler: a linear layer, with a `bias` or not, an activation and perhaps a norm; then a linear layer of one
    result. It reads the first token's state (BERT), or with `mean` the mean of all
    (ModernBERT). linear: one linear layer without a bias, of `n_results` (Qwen3ForSequenceClassification).
    tokens: the logits of `token_ids`, "no" and "yes" (Qwen3-Reranker). One result is the relevance's logit.
    Of two the second speaks for relevance, and the first against it.
    """

    kind: RankerKind = "pooler"
    n_results: int = 1
    token_ids: tuple[int, ...] = ()
    activation: Activation | Literal["tanh"] = "tanh"
    bias: bool = True
    norm: Norm | None = None
    mean: bool = False

    def __post_init__(self) -> None:
        check_choice("a ranker's kind", self.kind, RankerKind)
        least, most = {"pooler": (1, 1), "linear": (1, 2), "tokens": (2, 2)}[self.kind]
        check_whole("a ranker's results", self.n_results, least, most)
        n_tokens = self.n_results if self.kind == "tokens" else 0
        if len(self.token_ids) != n_tokens or len({*self.token_ids}) != n_tokens:
            raise ConfigError(f"token_ids has {list(self.token_ids)}; expected {n_tokens} different tokens")
        if self.activation == "xielu":
            raise ConfigError("a ranker's head with xielu, which has weights of its own, is not supported")

    @property
    def pooling(self) -> Pooling:
        """The state that the head reads: a token's, or the mean of all."""
        if self.kind != "pooler":
            return "last"
        return "mean" if self.mean else "cls"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a model: all that its mathematics needs, whatever file it came from.

    Sizes are counts of elements; `n_positions` is the longest sequence in tokens, input and output together.
    With an `encoder` the input goes to the encoder, and `layers` are the decoder's, each with cross
    attention. Then `n_positions` counts the decoder's tokens alone, which begin with
    `decoder_start_token_id`; the forced ids are the decoder's first token after its prompt, and its last one
    where it reaches its longest output.

    Without causal masks the model makes embeddings and generates nothing: a request's tokens all run in one
    iteration. The last of the `n_positions` is then of the sampled token that ends the request, and is never
    computed. A `ranker` reads two texts at once, and its embedding is their relevance to one another
    (a cross-encoder); `ranker_head` says how it is computed. A model with causal masks that `embeds`, or
    ranks, generates nothing either.

    Layers may differ, but not in the number of their query heads. Without `positions` nothing is added to
    token embeddings. `vocab_multiple` pads the embedding table to a multiple, for hardware or for sharding;
    padded ids are never sampled. Logits are multiplied by `logit_multiplier`, then capped: logit_soft_cap *
    tanh(logits / logit_soft_cap). `forms` says how devices hold the weights outside of layers.

    With `reads` the model is a head that drafts for another. That model has `kept_states`: the layers whose
    inputs stay in its cache for the head.
    """

    vocab_size: int
    n_positions: int
    hidden_size: int
    layers: tuple[Layer, ...]
    embedding: Embedding
    positions: LearnedPositions | None = LearnedPositions()
    final_norm: Norm | None = LAYER_NORM
    head_bias: bool = False
    logit_multiplier: float = 1.0
    logit_soft_cap: float | None = None
    vocab_multiple: int = 1
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    encoder: Encoder | None = None
    decoder_start_token_id: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    forms: Forms = ()
    ranker: bool = False
    ranker_head: RankerHead = RankerHead()
    embeds: bool = False
    reads: ReadStates | None = None
    kept_states: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_positions", "hidden_size", "vocab_multiple"):
            check_size(name, getattr(self, name))
        check_size("n_layers", len(self.layers))
        if all(layer.attention is None for layer in self.layers):
            raise ConfigError("a model without any attention layer is not supported")
        if all(layer.feed_forward is None for layer in self.layers):
            raise ConfigError("a model without any feed-forward layer is not supported")
        check_positive("logit_multiplier", self.logit_multiplier)
        if self.logit_soft_cap is not None:
            check_positive("logit_soft_cap", self.logit_soft_cap)
        joined = self.reads is not None and self.reads.kind == "eagle3"
        if any((layer.residual == "joined") is not joined for layer in self.layers):
            raise ConfigError("residual is 'joined', which only the layer of an EAGLE-3 head can be")
        self._check_heads()
        self._check_encoder()
        self._check_packed()
        special = (
            *(*self.eos_token_ids, self.bos_token_id, self.decoder_start_token_id),
            *(self.forced_bos_token_id, self.forced_eos_token_id),
            *self.ranker_head.token_ids,
        )
        for token_id in special:
            if token_id is not None:
                check_whole("a special token id", token_id, 0, self.vocab_size - 1)

    def _check_heads(self) -> None:
        every = [(f"layer {i}", layer.attention) for i, layer in enumerate(self.layers)]
        every += [
            (f"cross attention of layer {i}", layer.cross)
            for i, layer in enumerate(self.layers)
            if layer.cross
        ]
        if self.encoder is not None:
            every += [(f"encoder layer {i}", layer.attention) for i, layer in enumerate(self.encoder.layers)]
        first = self.attention
        first_name = next(name for name, attention in every if attention is not None)
        alike = self.encoder is not None
        for name, attention in every:
            if attention is None or attention is first:
                continue
            if _heads(attention, alike=alike) != _heads(first, alike=alike):
                raise ConfigError(
                    f"{name} has {_described_heads(attention)}, {first_name} {_described_heads(first)}; "
                    "layers with different numbers of query heads, or latent and other ones, or with an "
                    "encoder any that differ, are not supported"
                )
        self._check_shared()

    def _check_shared(self) -> None:
        """Check which layers take the keys and values of others, and that all or no layers have an input."""
        for i, layer in enumerate(self.layers):
            if layer.input_size != self.input_size:
                raise ConfigError("layers whose inputs have different sizes are not supported")
            own = layer.attention
            if own is None or own.kv_from is None:
                continue
            source = self.layers[own.kv_from].attention if own.kv_from < i else None
            if source is None or source.kv_from is not None:
                raise ConfigError(
                    f"layer {i} takes the keys and values of layer {own.kv_from}, which must be an earlier "
                    "layer that has its own"
                )
            heads = [(one.n_kv_heads, one.head_size, one.latent, one.kv_code) for one in (own, source)]
            if heads[0] != heads[1]:
                raise ConfigError(
                    f"layer {i} takes the keys and values of layer {own.kv_from}, whose heads differ"
                )

        first = next((layer.attention for layer in self.layers if layer.attention is not None), None)
        if first is not None and first.indexer is not None and first.indexer.shared:
            raise ConfigError("the first layer takes the keys that an earlier layer selected; there is none")
        kinds = {one.indexer and replace(one.indexer, shared=False) for one in self.attentions}
        if len(kinds) > 1:
            raise ConfigError("layers with different indexers, or with and without one, are not supported")

    def _check_encoder(self) -> None:
        if self.encoder is not None and self.has_state:
            raise ConfigError("recurrent layers in a model with an encoder are not supported")
        if any((layer.cross is None) is not (self.encoder is None) for layer in self.layers):
            raise ConfigError(
                "cross attention without an encoder, or an encoder without it, is not supported"
            )
        if len({attention.causal for attention in self.attentions}) > 1:
            raise ConfigError("layers with and without a causal mask in one model are not supported")
        if self.is_bidirectional and (self.encoder is not None or self.has_state):
            part = "a decoder's layer" if self.encoder is not None else "a layer beside recurrent ones"
            raise ConfigError(f"{part} that is not causal is not supported")
        if self.ranker and self.is_bidirectional is not (self.ranker_head.kind == "pooler"):
            masks = "without" if self.is_bidirectional else "with"
            raise ConfigError(
                f"a ranker by {self.ranker_head.kind} in a model {masks} causal masks is not supported"
            )
        if self.only_pools and self.encoder is not None:
            raise ConfigError("embeddings of a model with an encoder are not supported")
        if self.encoder is None:
            return
        if self.attention.group != 1:
            raise ConfigError("grouped heads in a model with an encoder are not supported")
        if self.embedding.size != self.hidden_size:
            raise ConfigError("an embedding_size of its own in a model with an encoder is not supported")
        if self.decoder_start_token_id is None:
            raise ConfigError("decoder_start_token_id is None; a model with an encoder needs one")

    def _check_packed(self) -> None:
        for each in self.feed_forwards:
            if each.experts is None or not each.experts.packed:
                continue
            for name, size in (("hidden_size", self.hidden_size), ("ffn_size", each.size)):
                if size % BLOCK:
                    raise ConfigError(f"{name} is {size}; experts packed in MXFP4 need a multiple of {BLOCK}")

    def __hash__(self) -> int:
        """Hash the first layer for all: a model is the key of caches, and may have a thousand layers."""
        parts = (self.layers[0], len(self.layers), self.embedding, self.positions, self.final_norm)
        return hash((self.vocab_size, self.n_positions, self.hidden_size, self.vocab_multiple, parts))

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> Attention:
        """The first attention layer's attention; all attention layers have the same heads."""
        return next(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The attention of each layer that has any, in order."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def has_linear_attention(self) -> bool:
        """Whether any recurrent mixer has a state for each head, and not a convolution alone."""
        return any("heads" in each.state_shapes for each in self.recurrences)

    @property
    def recurrences(self) -> tuple[Recurrence, ...]:
        """The distinct recurrent mixers."""
        found = (layer.recurrence for layer in self.layers)
        return tuple(dict.fromkeys(each for each in found if each is not None))

    @property
    def n_state_shares(self) -> int:
        """The number of devices in whose order the rows of recurrent layers are."""
        return max((each.n_shares for each in self.recurrences), default=1)

    @property
    def has_state(self) -> bool:
        """Whether any layer is recurrent, so that each request has a state of fixed size."""
        return any(layer.recurrence is not None for layer in self.layers)

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens see later ones, so that the model makes embeddings and generates nothing (BERT)."""
        return not self.attention.causal

    @property
    def only_pools(self) -> bool:
        """Whether the model makes embeddings or ranks texts, and generates nothing."""
        return self.is_bidirectional or self.ranker or self.embeds

    @property
    def pooled_size(self) -> int:
        """Numbers of an embedding."""
        return self.ranker_head.n_results if self.ranker else self.embedding.size

    @property
    def n_heads(self) -> int:
        return self.attention.n_heads

    @property
    def n_kv_heads(self) -> int:
        return self.attention.n_kv_heads

    @property
    def head_size(self) -> int:
        """D: elements of one head."""
        return self.attention.head_size

    @property
    def feed_forwards(self) -> tuple[FeedForward, ...]:
        """The distinct feed-forward parts, including the encoder's."""
        every = (*self.layers, *(self.encoder.layers if self.encoder else ()))
        found = (each for layer in every for each in (layer.feed_forward, layer.beside))
        return tuple(dict.fromkeys(each for each in found if each is not None))

    @property
    def input_size(self) -> int | None:
        """Elements of each layer's own input of a token, from one embedding for all layers; None without."""
        return self.layers[0].input_size

    @property
    def carried_size(self) -> int:
        """Elements of a token that `Transformer.last_layer` takes: x, and what else the layer needs."""
        beside = self.hidden_size if self.layers[-1].has_both else 0
        return self.hidden_size + beside + (self.input_size or 0) + self.selected_size

    @property
    def selected_size(self) -> int:
        """Elements that carry the keys which the last layer takes from an earlier one; 0 if it selects."""
        attention = self.layers[-1].attention
        indexer = None if attention is None else attention.indexer
        return SELECTED_DIGITS * indexer.top_k if indexer is not None and indexer.shared else 0

    def selection_of(self, layer: int) -> int:
        """The layer that selects the keys which a layer sees: itself, or the one whose selection it takes."""
        own = self.layers[layer].attention
        if own is None or own.indexer is None or not own.indexer.shared:
            return layer
        earlier = ((i, self.layers[i].attention) for i in reversed(range(layer)))
        return next(i for i, one in earlier if one and one.indexer is not None and not one.indexer.shared)

    def memory_of(self, layer: int) -> int:
        """The layer whose cache a layer reads: itself, or the one whose keys and values it takes."""
        attention = self.layers[layer].attention
        return layer if attention is None or attention.kv_from is None else attention.kv_from

    @property
    def widest(self) -> Attention:
        """The attention with the largest keys and queries, of layers that may differ."""
        return max(self.attentions, key=lambda each: (each.kv_width, each.width))

    @property
    def feed_forward(self) -> FeedForward:
        """The first layer's feed-forward, or of layers of one part the first that there is."""
        return self.feed_forwards[0]

    @property
    def has_experts(self) -> bool:
        """Whether any of its layers has experts."""
        return self.kind_of_experts is not None

    @property
    def expert_routing(self) -> tuple[int, int, int]:
        """Sparse layers, experts that a token chooses in each, experts in each; zeros where layers differ."""
        sparse = [layer.experts for layer in self.layers if layer.experts is not None]
        kinds = {(experts.top_k, experts.number) for experts in sparse}
        return (len(sparse), *kinds.pop()) if len(kinds) == 1 else (0, 0, 0)

    @property
    def kind_of_experts(self) -> Literal["plain", "other"] | None:
        """Whether all experts are plain or some are not; None for a model without experts."""
        plain = [each.is_plain for each in self.feed_forwards if each.experts is not None]
        return None if not plain else "plain" if all(plain) else "other"

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def kept_width(self) -> int:
        """Elements of a token's states that stay in the cache for a head."""
        return len(self.kept_states) * self.hidden_size

    def read_by(self, head: "ModelConfig | None") -> "ModelConfig":
        """The same model, with the states in its cache that this head reads, if it is one."""
        if head is None or head.reads is None:
            return self
        assert head.reads.size == self.hidden_size, "a head is checked when it is found"
        return replace(self, kept_states=head.reads.layers)

    def with_packed_experts(self) -> "ModelConfig":
        """The same model whose experts stay packed in MXFP4. Raises ConfigError where it has none."""
        if not self.has_experts or self.encoder is not None:
            raise ConfigError("the model has no experts that could stay packed")

        def packed(layer: Layer) -> Layer:
            experts = layer.experts
            if experts is None or layer.beside is not None:
                return layer
            return layer.with_feed_forward(experts=replace(experts, packed=True))

        return self._with_layers(packed)

    @property
    def has_packed_experts(self) -> bool:
        """Whether experts stay packed in MXFP4."""
        return any(each.experts is not None and each.experts.packed for each in self.feed_forwards)

    @property
    def fixed_weights(self) -> str | None:
        """Why weights of this model cannot be replaced; None if they can."""
        if self.has_packed_experts:
            return _FIXED
        return next((form.fixed for form in self.weight_forms.values() if form.fixed), None)

    @property
    def weight_forms(self) -> dict[str, WeightForm]:
        """The forms by the weights' names; weights that are not named are dense, but for packed experts."""
        found = dict(self.forms)
        encoder = () if self.encoder is None else self.encoder.layers
        for prefix, layers in (("layers", self.layers), ("encoder.layers", encoder)):
            for i, layer in enumerate(layers):
                found |= {f"{prefix}.{i}.{name}": form for name, form in layer.forms}
        return found

    def with_forms(self, forms: Mapping[str, WeightForm]) -> "ModelConfig":
        """The same model with its weights in these forms, by name; all others become dense.

        families.parameters.packable_weights has the weights that may have a form.
        """
        by_layer: dict[str, dict[str, WeightForm]] = {}
        for name, form in forms.items():
            if not isinstance(form, Dense):
                layer = _LAYER.match(name)
                prefix = layer[0] if layer else ""
                by_layer.setdefault(prefix, {})[name.removeprefix(prefix)] = form

        def formed(layers: tuple[Layer, ...], prefix: str) -> tuple[Layer, ...]:
            found: dict[tuple[Layer, Forms], Layer] = {}
            result: list[Layer] = []
            for i, layer in enumerate(layers):
                own = tuple(sorted(by_layer.get(f"{prefix}{i}.", {}).items(), key=itemgetter(0)))
                if (layer, own) not in found:
                    found[layer, own] = replace(layer, forms=own)
                result.append(found[layer, own])
            return tuple(result)

        encoder = self.encoder
        if encoder is not None:
            encoder = replace(encoder, layers=formed(encoder.layers, "encoder.layers."))
        outside = tuple(sorted(by_layer.get("", {}).items(), key=itemgetter(0)))
        return replace(self, layers=formed(self.layers, "layers."), encoder=encoder, forms=outside)

    def with_kv_heads(self, repeats: int) -> "ModelConfig":
        """The same model with each K/V head of the checkpoint `repeats` times in a row."""
        if repeats == self.attention.kv_repeats:
            return self
        return self._with_layers(lambda layer: layer.with_kv_heads(repeats))

    def with_state_shares(self, n: int) -> "ModelConfig":
        """The same model with the rows of recurrent layers in the order of `n` devices."""
        if all(each.n_shares == n for each in self.recurrences):
            return self

        def shared(layer: Layer) -> Layer:
            own = layer.recurrence
            return layer if own is None else replace(layer, recurrence=replace(own, n_shares=n))

        return self._with_layers(shared)

    def as_stored(self) -> "ModelConfig":
        """The same model with heads and rows as a checkpoint has them, for one device."""
        return self.with_kv_heads(1).with_state_shares(1)

    def with_kv_code(self, code: KVCode) -> "ModelConfig":
        """The same model whose caches hold keys and values in eight bits. Raises ConfigError.

        An encoder's tokens attend to one another through the first layer's cache, so its keys and values are
        rounded too.
        """
        model, encoder = self._with_layers(lambda layer: layer.with_kv_code(code)), self.encoder
        if encoder is not None:
            layers = tuple(layer.with_kv_code(code) for layer in encoder.layers)
            model = replace(model, encoder=replace(encoder, layers=layers))
        return model

    def _with_layers(self, change: Callable[[Layer], Layer]) -> "ModelConfig":
        changed = {layer: change(layer) for layer in dict.fromkeys(self.layers)}
        return replace(self, layers=tuple(changed[layer] for layer in self.layers))

    def for_devices(self, n_devices: int) -> "ModelConfig":
        """The model as the `n_devices` of a stage hold it, with equal shares of heads and vocabulary.

        The vocabulary is padded, and K/V heads are repeated until they are a multiple of the devices. Raises
        ConfigError unless the devices can share the query heads, and those of recurrent layers.
        """
        self._check_shares(n_devices)
        if (self.kept_states or self.reads) and self.hidden_size % n_devices:
            raise ConfigError(
                f"tensor_parallel is {n_devices}, which does not divide the {self.hidden_size} numbers of "
                "the states that a head reads; choose a divisor of both heads and states, or another drafter"
            )
        stored = {each.n_kv_heads // each.kv_repeats for each in self.attentions}
        repeats = {math.lcm(n, n_devices) // n for n in stored}
        if len(repeats) > 1:
            raise ConfigError(
                f"tensor_parallel is {n_devices}, and layers have {' and '.join(map(str, sorted(stored)))} "
                "key/value heads; where layers differ, it must divide each of these"
            )
        if any(self.n_heads % math.lcm(n, n_devices) for n in stored):
            raise ConfigError(f"{self.n_heads} heads cannot be split over {n_devices} devices")
        model = self.with_kv_heads(repeats.pop()).with_state_shares(n_devices)
        if model.padded_vocab_size % n_devices == 0:
            return model
        return replace(model, vocab_multiple=math.lcm(self.vocab_multiple, n_devices))

    def _check_shares(self, n_devices: int) -> None:
        """Raise ConfigError unless the devices can share every recurrent mixer."""
        mixers = self.recurrences
        wrong = next((each for each in mixers if not each.divides(n_devices)), None)
        if wrong is not None:
            possible = [
                n
                for n in range(1, self.n_heads + 1)
                if self.n_heads % n == 0 and all(each.divides(n) for each in mixers)
            ]
            raise ConfigError(
                f"tensor_parallel is {n_devices}, and recurrent layers have {wrong.sizes_in_words}; use one "
                f"of {', '.join(map(str, possible))}, with pipeline_parallel for more devices"
            )


def _heads(attention: Attention, *, alike: bool) -> tuple[int | Latent | None, ...]:
    """The parts of a layer's heads that all layers share; with `alike` every size."""
    own = (attention.n_kv_heads, attention.head_size) if alike or attention.latent is not None else ()
    return (attention.n_heads, attention.kv_repeats, attention.latent, *own)


def _described_heads(attention: Attention) -> str:
    grouped = f" and {attention.n_kv_heads} key/value heads" if attention.group > 1 else ""
    return f"{attention.n_heads} heads{grouped} of {attention.head_size} elements"
