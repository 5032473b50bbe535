"""The shape of a model, composed of small parts, each checked when it is made.

A part says what a block of the model computes. A new kind of block is a new value of a field, or a new field
whose default is what is computed today; what is not computed is refused here, with a ConfigError.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from orca_jax.config import check_whole
from orca_jax.errors import ConfigError

NormKind = Literal["layer_norm", "rms_norm"]
Activation = Literal["gelu_tanh", "gelu", "relu", "silu"]
Residual = Literal["pre", "post"]

# Nobody has trained a model beyond these; a config that claims more is a mistake or an attack.
_LIMITS = {
    "vocab_size": 1 << 22,
    "n_positions": 1 << 21,
    "hidden_size": 1 << 17,
    "embedding_size": 1 << 17,
    "ffn_size": 1 << 20,
    "n_layers": 1024,
    "n_heads": 1024,
    "n_kv_heads": 1024,
    "head_size": 1 << 17,
    "vocab_multiple": 1 << 16,
}


def check_size(name: str, value: object) -> None:
    """Raises ConfigError unless `value` is a whole number within the limits of the size of that name."""
    check_whole(name, value, 1, _LIMITS[name])


def _check_choice(name: str, value: object, choices: object) -> None:
    if value not in get_args(choices):
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(get_args(choices))}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """`layer_norm` has a scale and a bias, `rms_norm` a scale alone."""

    kind: NormKind = "layer_norm"
    eps: float = 1e-5

    def __post_init__(self) -> None:
        _check_choice("the kind of a norm", self.kind, NormKind)
        if not 0.0 < self.eps < 1.0:
            raise ConfigError(f"norm_eps is {self.eps!r}; it must be between 0 and 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Causal attention with `n_heads` query heads of `head_size` elements, scaled by 1 / sqrt(head_size)."""

    n_heads: int
    n_kv_heads: int
    head_size: int
    qkv_bias: bool = True
    out_bias: bool = True

    def __post_init__(self) -> None:
        for name in ("n_heads", "n_kv_heads", "head_size"):
            check_size(name, getattr(self, name))
        if self.n_kv_heads != self.n_heads:
            raise ConfigError(
                f"n_kv_heads is {self.n_kv_heads}, n_heads {self.n_heads}; grouped heads are not supported"
            )

    @property
    def width(self) -> int:
        """Elements of all query heads, N * D."""
        return self.n_heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Elements of all key heads, K * D; the values have as many."""
        return self.n_kv_heads * self.head_size


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForward:
    """Two linear operations with the activation function between them; `size` is the width between them."""

    size: int
    activation: Activation = "gelu_tanh"
    gated: bool = False
    bias: bool = True

    def __post_init__(self) -> None:
        check_size("ffn_size", self.size)
        _check_choice("activation", self.activation, Activation)
        if self.gated:
            raise ConfigError("gated is true; a gated feed-forward layer is not supported")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A Transformer layer. `residual` says where its two norms are.

    pre: in front of attention and feed-forward, x + f(norm(x)); post: after the sum, norm(x + f(x)).
    """

    attention: Attention
    feed_forward: FeedForward
    norm: Norm = Norm()
    residual: Residual = "pre"

    def __post_init__(self) -> None:
        _check_choice("residual", self.residual, Residual)


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedPositions:
    """A table with a row for each position; `offset` is added to a position before it is read (OPT: 2)."""

    offset: int = 0

    def __post_init__(self) -> None:
        check_whole("position_offset", self.offset, 0, 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    """The table of tokens. Where `size` is not the hidden size, there are projections around the layers.

    `tied`: the head has the same weights.
    """

    size: int
    tied: bool = True

    def __post_init__(self) -> None:
        check_size("embedding_size", self.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """All that the mathematics of a decoder needs to know, and nothing of where it came from.

    Sizes are counts of elements; `n_positions` is the longest sequence in tokens, input and output together.
    Layers may differ in all but their attention's heads. Without `positions` nothing is added to the token's
    embedding. `vocab_multiple` pads the embedding table to a multiple, for hardware or for sharding; padded
    ids are never sampled.
    """

    vocab_size: int
    n_positions: int
    hidden_size: int
    layers: tuple[Layer, ...]
    embedding: Embedding
    positions: LearnedPositions | None = LearnedPositions()
    final_norm: Norm | None = Norm()
    vocab_multiple: int = 1
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_positions", "hidden_size", "vocab_multiple"):
            check_size(name, getattr(self, name))
        check_size("n_layers", len(self.layers))
        first = self.attention
        for i, layer in enumerate(self.layers):
            own = layer.attention
            if own is not first and (own.n_heads, own.head_size) != (first.n_heads, first.head_size):
                raise ConfigError(
                    f"layer {i} has {own.n_heads} heads of {own.head_size} elements, layer 0 {first.n_heads} "
                    f"of {first.head_size}; layers whose heads differ are not supported"
                )
        if first.width != self.hidden_size:
            raise ConfigError(
                f"hidden_size is {self.hidden_size}, and {first.n_heads} heads of {first.head_size} have "
                f"{first.width} elements together; heads of another width are not supported"
            )
        for token_id in (*self.eos_token_ids, *([] if self.bos_token_id is None else [self.bos_token_id])):
            check_whole("a special token id", token_id, 0, self.vocab_size - 1)

    def __hash__(self) -> int:
        """Of the first layer, for all of them: a model is the key of caches, and may have a thousand."""
        parts = (self.layers[0], len(self.layers), self.embedding, self.positions, self.final_norm)
        return hash((self.vocab_size, self.n_positions, self.hidden_size, self.vocab_multiple, parts))

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> Attention:
        """That of the first layer; all have its heads."""
        return self.layers[0].attention

    @property
    def n_heads(self) -> int:
        return self.attention.n_heads

    @property
    def head_size(self) -> int:
        """D: elements of one head."""
        return self.attention.head_size

    @property
    def ffn_sizes(self) -> tuple[int, ...]:
        """The different widths of the feed-forward layers."""
        return tuple({layer.feed_forward.size: None for layer in self.layers})

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
