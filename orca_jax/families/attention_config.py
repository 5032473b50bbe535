"""The shape of a layer's attention: its heads, and what happens to queries, keys and scores."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from orca_jax.checks import check_whole
from orca_jax.errors import ConfigError
from orca_jax.families.limits import check_choice, check_positive, check_size
from orca_jax.families.norm_config import Norm
from orca_jax.families.rotary import Rotary

QKNormOver = Literal["head", "width"]
KVCode = Literal["int8", "fp8"]  # numbers of eight bits for cached keys and values; fp8 is e4m3

SCALE_BYTES = 4  # of the float32 scale that a head's key, or its value, has in a cache of eight bits


@dataclass(frozen=True, kw_only=True, slots=True)
class QKNorm:
    """An RMSNorm of queries and of keys before rotation, or with `after_rotation` behind it (HunYuan).

    It is over each `head`, with one scale [D] for all (Qwen 3, Gemma 3), or over the full `width` of all
    heads (OLMo 2). Over heads it may lack the scale (Llama 4).
    """

    norm: Norm
    over: QKNormOver = "head"
    after_rotation: bool = False
    scaled: bool = True

    def __post_init__(self) -> None:
        check_choice("what a qk-norm is over", self.over, QKNormOver)
        if self.norm.kind != "rms_norm":
            raise ConfigError(f"the kind of a qk-norm is {self.norm.kind!r}; only rms_norm is supported")
        if self.over == "width" and not self.scaled:
            raise ConfigError("a qk-norm over the full width without a scale is not supported")
        if self.after_rotation and self.over == "width":
            raise ConfigError("a qk-norm after rotation over the full width is not supported")


@dataclass(frozen=True, kw_only=True, slots=True)
class RelativeBias:
    """A learned addend to a head's scores, by the distance of key and query (T5, Raffel et al., 2020).

    Each near distance has a bucket; far distances share buckets that widen logarithmically up to
    `max_distance`, and all beyond share the last bucket. Where attention is not causal, half of the
    `n_buckets` are for keys after the query. With `shared` all layers use one table.
    """

    n_buckets: int = 32
    max_distance: int = 128
    shared: bool = False

    def __post_init__(self) -> None:
        check_size("relative_buckets", self.n_buckets)
        check_size("relative_distance", self.max_distance)
        if self.n_buckets < 4 or self.n_buckets % 2:
            raise ConfigError(f"relative_buckets is {self.n_buckets}; it must be even, and at least 4")
        if self.max_distance <= self.n_buckets // 2:
            raise ConfigError(
                f"relative_distance is {self.max_distance}; it must be more than half of the "
                f"{self.n_buckets} relative_buckets"
            )

    def buckets(self, *, causal: bool) -> npt.NDArray[np.int32]:
        """The bucket of each distance (key position - query position), [2 * max_distance + 1].

        The first also holds for all distances below -max_distance, the last for all above max_distance. In
        causal attention keys after the query, which are masked, have bucket 0.
        """
        distance = np.arange(-self.max_distance, self.max_distance + 1)
        n_buckets = self.n_buckets if causal else self.n_buckets // 2
        far = np.maximum(-distance, 0) if causal else np.abs(distance)
        n_near = n_buckets // 2
        # In float32, as T5 computes it: at some distances rounding decides whether the logarithm is whole.
        ratio = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(n_near))
        ratio /= np.float32(math.log(self.max_distance / n_near))
        shared = n_near + (ratio * np.float32(n_buckets - n_near)).astype(np.int32)
        buckets = np.where(far < n_near, far, np.minimum(shared, n_buckets - 1))
        return (buckets + (0 if causal else n_buckets) * (distance > 0)).astype(np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Temperature:
    """A factor on queries that grows with their position: 1 + scale * log(1 + floor(position / step)).

    It keeps the softmax sharp over contexts of many times `step` tokens (Ministral 3). `offset` is added to
    positions (Llama 4).
    """

    scale: float
    step: int
    offset: int = 0

    def __post_init__(self) -> None:
        check_positive("temperature_scale", self.scale)
        check_size("n_positions", self.step)
        check_whole("the offset of a temperature", self.offset, 0, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The computation of attention scores from queries and keys.

    The score is scale * q.k (None: head_size ** -0.5), times the query's `temperature`, then soft_cap *
    tanh(score / soft_cap). ALiBi (Press et al., 2021) adds the head's slope times `alibi` times (key position
    - query position), T5 a `relative` bias. With a `window` a token sees itself and the window - 1 tokens
    before it, as in transformers, or if that is `chunked` those of its own chunk of so many (Llama 4).
    Without a causal mask it sees as many after it too (ModernBERT). With `sinks` each query head has a
    learned score that enters its softmax and has no value, so that a token can attend to nothing (gpt-oss).
    """

    scale: float | None = None
    window: int | None = None
    chunked: bool = False
    soft_cap: float | None = None
    alibi: float | None = None
    relative: RelativeBias | None = None
    sinks: bool = False
    temperature: Temperature | None = None

    def __post_init__(self) -> None:
        for name, label in (("scale", "attention_scale"), ("soft_cap", "attention_soft_cap")):
            if getattr(self, name) is not None:
                check_positive(label, getattr(self, name))
        if self.window is not None:
            check_size("window", self.window)
        elif self.chunked:
            raise ConfigError("chunks of attention need their size, a window")
        if self.alibi is not None:
            check_positive("alibi", self.alibi)
        if self.relative is not None and (self.alibi is not None or self.soft_cap is not None):
            raise ConfigError("a relative bias with ALiBi or a soft cap is not supported")


FEWEST_PLAIN = 32  # new tokens of a row from which the plain form of latent attention was measured faster

_LATENT_NORM = Norm(kind="rms_norm", eps=1e-6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Latent attention: a token's compressed vector gives its keys and values (DeepSeek-V2, section 2.1).

    The vector's first `rank` elements, normalised, are projected to each head's key of `plain_size` elements
    and its value of `value_size`. Its last `rotary_size` elements, rotated, complete the keys of all heads.
    Queries have the same two parts; with a `query_rank` they are projected from a compressed, normalised
    vector too.
    """

    rank: int
    rotary_size: int
    plain_size: int
    value_size: int
    query_rank: int | None = None
    norm: Norm = _LATENT_NORM

    def __post_init__(self) -> None:
        for name in ("rank", "rotary_size", "plain_size", "value_size"):
            check_size(f"latent_{name}", getattr(self, name))
        if self.query_rank is not None:
            check_size("latent_query_rank", self.query_rank)
        if self.norm.kind != "rms_norm":
            raise ConfigError(f"the kind of a latent norm is {self.norm.kind!r}; only rms_norm is supported")

    @property
    def width(self) -> int:
        """Elements cached for a token."""
        return self.rank + self.rotary_size

    @property
    def query_size(self) -> int:
        """Elements of a head's query, and of its key."""
        return self.plain_size + self.rotary_size

    def is_plain(self, n_tokens: Any, kv_length: Any) -> Any:
        """Whether a row with `n_tokens` new tokens, the last of its `kv_length`, takes the plain form.

        The arguments are numbers, or int32 arrays with an element for each row. The plain form projects each
        of the row's `kv_length` compressed vectors to keys and values once. The absorbed form applies the
        projections to the new tokens' queries and results instead, and computes more for each pair of query
        and key.
        """
        projected = float(self.rank * (self.plain_size + self.value_size))  # multiplications for each key
        saved = float(2 * self.rank - self.plain_size - self.value_size)  # multiplications for each pair
        n_seen = kv_length - (n_tokens - 1) / 2  # keys that a query sees on average
        fewer = n_tokens * n_seen * saved > (kv_length - n_tokens) * projected
        return (n_tokens >= FEWEST_PLAIN) & fewer


_INDEX_NORM = Norm(eps=1e-6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Indexer:
    """The part of sparse attention that selects the keys of each query (DeepSeek-V3.2, equation 1).

    A token has an index key of `head_size` elements: a projection of its hidden state, after a LayerNorm. The
    score of a key for a query is sum_h w_h relu(q_h . k) over `n_heads` index queries, which are projected
    from latent attention's compressed query, with weights w projected from the hidden state. Attention then
    sees the `top_k` keys of the greatest scores among those up to the query, the earlier of equal ones. The
    first elements of queries and keys are rotated as attention's are, in pairs that may be `interleaved`.

    A `shared` indexer has no weights and no index keys: its layer sees the keys that the nearest layer before
    it with an indexer of its own has selected (GLM-5.2).
    """

    n_heads: int
    head_size: int
    top_k: int
    interleaved: bool = False
    norm: Norm = _INDEX_NORM
    shared: bool = False

    def __post_init__(self) -> None:
        for name in ("n_heads", "head_size", "top_k"):
            check_size(f"index_{name}", getattr(self, name))
        if self.norm.kind != "layer_norm" or not self.norm.has_bias:
            raise ConfigError("the norm of index keys must be a LayerNorm with a bias")

    @property
    def key_size(self) -> int:
        """Elements of a token's index key in this layer's cache."""
        return 0 if self.shared else self.head_size

    @property
    def scale(self) -> float:
        """The factor on the sum of weighted scores."""
        return (self.head_size * self.n_heads) ** -0.5


def latent_attention(latent: Latent, *, n_heads: int, rotary: Rotary, **other: Any) -> "Attention":
    """Attention of `n_heads` query heads to one compressed K/V head; `other` goes to Attention."""
    return Attention(
        n_heads=n_heads, n_kv_heads=1, head_size=latent.width, rotary=rotary, latent=latent, **other
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Attention of `n_heads` query heads, `group` for each of the `n_kv_heads` K/V heads of `head_size`.

    With `causal` a token sees itself and the tokens before it, else all tokens. Each K/V head of the
    checkpoint is held `kv_repeats` times in a row, so that more devices than K/V heads can share a layer
    (`ModelConfig.for_devices`). With an `output_gate` results are multiplied by the sigmoid of one more
    projection, of the queries' shape (Qwen3-Next). With `latent` the one K/V head is the compressed vector,
    and `qkv_bias` is the bias of the projections that compress. With a `kv_code` the cache holds keys and
    values in eight bits: each head's key, and its value, of each token has a scale of its own.

    With a `value_norm` each head's value passes an RMSNorm without a scale, whose eps that is. With
    `values_are_keys` a value is its key before norm and rotation. With `kv_from` the layer has no keys and
    values of its own, and attends to those of the earlier layer of this index (all three: Gemma 4). With an
    `indexer`, which needs latent attention, a query sees only the keys that it selects.
    """

    n_heads: int
    n_kv_heads: int
    head_size: int
    qkv_bias: bool = True
    out_bias: bool = True
    qk_norm: QKNorm | None = None
    rotary: Rotary | None = None
    scores: Scores = Scores()
    kv_repeats: int = 1
    causal: bool = True
    latent: Latent | None = None
    kv_code: KVCode | None = None
    output_gate: bool = False
    value_norm: float | None = None
    values_are_keys: bool = False
    kv_from: int | None = None
    indexer: Indexer | None = None

    def __post_init__(self) -> None:
        for name in ("n_heads", "n_kv_heads", "head_size", "kv_repeats"):
            check_size(name, getattr(self, name))
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if self.n_kv_heads % self.kv_repeats:
            raise ConfigError(
                f"n_kv_heads {self.n_kv_heads} is not a multiple of kv_repeats {self.kv_repeats}"
            )
        if self.rotary is not None and self.rotary.size > self.head_size:
            raise ConfigError(
                f"rotary_size is {self.rotary.size}; it must be at most the head_size {self.head_size}"
            )
        scores = self.scores
        if not self.causal and (scores.chunked or scores.alibi is not None or scores.sinks):
            raise ConfigError("chunks, ALiBi or sinks in attention that is not causal are not supported")
        if scores.relative is not None and self.group != 1:
            raise ConfigError("a relative bias with grouped heads is not supported")
        if self.kv_code is not None:
            check_choice("kv_cache_dtype", self.kv_code, KVCode)
        if self.latent is not None:
            self._check_latent(self.latent)
        self._check_values()
        if self.indexer is not None:
            self._check_indexer(self.indexer)

    def _check_values(self) -> None:
        own = (self.value_norm, self.values_are_keys, self.kv_from)
        if self.value_norm is not None:
            check_positive("norm_eps", self.value_norm)
        if own != (None, False, None) and (self.latent is not None or self.output_gate or not self.causal):
            raise ConfigError(
                "values with a norm, values that are keys, or keys and values of another layer are not "
                "supported with latent keys and values, an output gate, or without a causal mask"
            )
        if self.kv_from is not None:
            check_whole("the layer whose keys and values another one takes", self.kv_from, 0, 1 << 20)
            if self.value_norm is not None or self.values_are_keys:
                raise ConfigError("a layer with another layer's keys and values has no values of its own")

    def _check_indexer(self, indexer: Indexer) -> None:
        if self.latent is None or self.latent.query_rank is None:
            raise ConfigError("an indexer needs latent attention with compressed queries (q_lora_rank)")
        if self.latent.rotary_size > indexer.head_size:
            raise ConfigError(
                f"index_head_size is {indexer.head_size}; it must be at least the {self.latent.rotary_size} "
                "elements that are rotated"
            )

    def _check_latent(self, latent: Latent) -> None:
        if self.n_kv_heads != self.kv_repeats or self.head_size != latent.width:
            raise ConfigError(
                f"latent attention has one key/value head of {latent.width} elements, not "
                f"{self.n_kv_heads // self.kv_repeats} of {self.head_size}"
            )
        if self.rotary is None or self.rotary.size != latent.rotary_size:
            raise ConfigError(
                f"latent attention rotates {latent.rotary_size} elements, not "
                f"{0 if self.rotary is None else self.rotary.size}"
            )
        scores = self.scores
        if (
            self.output_gate
            or self.qk_norm is not None
            or not self.causal
            or scores != Scores(scale=scores.scale, temperature=scores.temperature)
        ):
            raise ConfigError(
                "latent attention with an output gate, a qk-norm, a window, a soft cap, ALiBi or a relative "
                "bias, or that is not causal, is not supported"
            )
        if self.kv_code is not None:
            raise ConfigError(
                f"kv_cache_dtype is {self.kv_code!r}, and latent attention keeps one compressed vector for "
                "all heads, which is not rounded to eight bits; leave it out"
            )

    def repeated(self, times: int) -> "Attention":
        """The same attention with each K/V head of the checkpoint `times` times."""
        stored = self.n_kv_heads // self.kv_repeats
        return replace(self, n_kv_heads=stored * times, kv_repeats=times)

    @property
    def group(self) -> int:
        """G: query heads of each K/V head."""
        return self.n_heads // self.n_kv_heads

    @property
    def kv_slices(self) -> int:
        """The number of projections to keys and values: two, or one where values are keys, or none."""
        return 0 if self.kv_from is not None else 1 if self.values_are_keys else 2

    @property
    def width(self) -> int:
        """Elements of all query heads, N * D, in the form that meets cached keys."""
        return self.n_heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Elements of all key heads, K * D."""
        return self.n_kv_heads * self.head_size

    @property
    def cached_width(self) -> int:
        """Elements that a layer caches for a token: keys and values, or compressed vector and index key."""
        if self.kv_from is not None:
            return 0
        if self.latent is None:
            return 2 * self.kv_width
        index = 0 if self.indexer is None else self.n_kv_heads * self.indexer.key_size
        return self.kv_width + index

    def cached_bytes(self, itemsize: int) -> int:
        """Bytes that a layer caches for a token, in a model whose elements have `itemsize` bytes."""
        if self.kv_code is None or self.kv_from is not None:
            return self.cached_width * itemsize
        return self.cached_width + 2 * self.n_kv_heads * SCALE_BYTES

    @property
    def value_size(self) -> int:
        """Elements of a query head's result, for latent attention before the projection to values."""
        return self.head_size if self.latent is None else self.latent.rank

    @property
    def value_part(self) -> int | None:
        """Leading elements of a cached key that are its value; None where values have a cache."""
        return None if self.latent is None else self.latent.rank

    @property
    def scale(self) -> float:
        """The factor on the product of a query and a key."""
        if self.scores.scale is not None:
            return self.scores.scale
        return (self.head_size if self.latent is None else self.latent.query_size) ** -0.5

    def slopes(self) -> npt.NDArray[np.float32] | None:
        """ALiBi's slopes by group and K/V head, [G, K]; None without ALiBi.

        For n heads, a power of two, the slope of head h from 1 is 2 ** (-8 h / n). Further heads take every
        second slope of 2n heads.
        """
        if self.scores.alibi is None:
            return None
        n = 1 << (self.n_heads.bit_length() - 1)
        first = [2.0 ** (-8 * h / n) for h in range(1, n + 1)]
        rest = [2.0 ** (-4 * h / n) for h in range(1, 2 * (self.n_heads - n) + 1, 2)]
        slopes = np.array([*first, *rest]) * self.scores.alibi
        return slopes.reshape(self.n_kv_heads, self.group).T.astype(np.float32)
