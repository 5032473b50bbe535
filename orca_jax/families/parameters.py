"""The weights of a model: their names, shapes, split, initial values and stages. No other file has a shape.

An axis is written in letters, and its size is their product; a digit is a size, and + makes a sum:

    V  rows of the vocabulary, padded     E  embedding size     P  rows of the position table
    t  rows of the table of segments      r  results of a ranker
    H  hidden size                        K  key/value heads    D  head size
    G  query heads of each K/V head       F  feed-forward size     U  buckets of a relative bias
    X  experts, each with a matrix        Y  experts, each with a row of the router
    S  size of the shared expert
    N  query heads of latent attention    Q  size of a head's query      W  size of its value
    A  rank of compressed queries         C  rank of compressed keys and values
    L  C and the rotated part of keys     M  a head's unrotated part of a key, and its value
    h  size of the experts' inputs, if it is not H
    i  size of a layer's own input        e  sizes of all layers' inputs together
    Z  numbers of a learned activation    B  channels of a convolution     J  its width in tokens
    R  heads of a recurrence              T  elements of a head's result
    O  elements of all heads' results     I  rows of a recurrence's projections together
    s  elements of the states that a head reads     v  tokens that it can draft
    q  elements of all index queries      k  size of an index key    w  index queries, with a weight each

Matrices are [out, in]. An axis with one of the letters in SPLIT is split over a stage's devices (ORCA 4.1,
Figure 6): QKV and up projections by their outputs, that is by heads and by feed-forward units; out and down
projections by the same units as their inputs; embedding and head by vocabulary. A layer then needs two sums
over the devices, after `out` and after `down`.

Heads are group-major, so that a device's share of K has each K/V head with its query heads. In `qkv` [G + 2,
K D, H] slices 0 to G - 1 are queries, slice G keys and slice G + 1 values; head k of slice g is query head k
* G + g of a checkpoint. The input of `out` [H, G, K D] has the same order, but in a form with flat inputs it
is [H, K G D], in a checkpoint's order. With one query head for each K/V
head these are [3, K D, H] and [H, K D]. Where values are keys, `qkv` lacks the last slice, and where both are
another layer's the last two. With an output gate `qkv` [2 G + 2, K D, H] begins with the gates' slices. In a
`joined` layer its inputs are 2 H. A gated `up` [2, F, H] has the gate, then up. `cross_kv` [2, K D, H] has
the keys, then the values.

Latent attention keeps a checkpoint's order of heads. `q_b` [N Q, A] (without compression `q` [N Q, H]) has
for each head its unrotated rows, then its rotated rows; `kv_b` [N M, C] has for each head the rows of its
key, then of its value. `q_a` [A, H] and `kv_a` [L, H] compress. Each device holds them whole, and an indexer
too: `index_q` [q, A], `index_k` [k, H] and `index_weights` [w, H].

A recurrent mixer is split by heads too: R, O, I and B. Where a projection or a convolution has several kinds
of rows, such as queries, keys and values, the rows are in the order of devices (`share_rows`).

Devices share experts either by splitting each expert's F or by holding whole experts: `split_axis` has the
rule, which depends on sizes alone. Either way one sum follows (model/token_slices.py has another way).

An encoder's layers are `encoder.layers.{i}`; the first stage has all of them and its decoder layers.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from orca_jax.families.attention_config import Attention
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import FeedForward, Layer, ModelConfig, ReadStates
from orca_jax.families.norm_config import Norm
from orca_jax.families.recurrence_config import (
    GatedDeltaNet,
    Mamba2,
    Recurrence,
    Segments,
    ShortConvolution,
)
from orca_jax.families.weight_form import (
    DENSE,
    EXACT,
    Dense,
    HeldArray,
    WeightForm,
    form_bytes,
    form_of,
)

SPLIT = frozenset("VKFSNBIRO")
_HEADS = frozenset("KN")
# The smallest part of an expert that keeps a matrix unit busy: a tile of a GPU, eight vectors of a CPU.
EXPERT_SHARE = 128
TOKEN_EMBEDDING, HEAD, HEAD_BIAS = "token_embedding", "head.weight", "head.bias"
# Row i of the head is the logit of token i + offsets[i], in a head that drafts only some tokens.
HEAD_OFFSETS = "head.offsets"

Initial = Literal["normal", "ones", "zeros"]  # normal: with deviation 0.02, as GPT-2 was initialised
Use = Literal["embedding", "linear", "expert", "bias", "norm", "head"]
Stage = Literal["first", "last", "both"]  # both: the first and the last

_COUNT = re.compile(r"[GX\d+]+")  # an axis that counts matrices
_LAYER = re.compile(r"(encoder\.)?layers\.(\d+)\.")
ENCODER = "encoder."
_XIELU_NUMBERS = 4  # two alphas before their softplus, beta, and the bound of the exponential's argument
FLAT_HEADS = "KGD"  # query heads in a checkpoint's order
_READ_WHOLE = ("kv_b.weight", "router.weight", "index_weights.weight")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One weight. `shape` has a size for each of `axes`; `stage` is None for a weight of a layer.

    `form` says which arrays hold it. With `whole` each device holds whole experts, whatever their size.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    initial: Initial
    use: Use
    stage: Stage | None = None
    form: WeightForm = DENSE
    whole: bool = False

    @property
    def n_in(self) -> int:
        """The number of its last axes that are a matrix's inputs."""
        return len(self.axes) - 1 if self.takes_attention else 1

    def held_arrays(self, dtype: npt.DTypeLike) -> Mapping[str, HeldArray]:
        """The arrays that hold it in a model of `dtype`, by their names in the form."""
        return self.form.arrays(self.shape, dtype)

    def dense_dtype(self, dtype: npt.DTypeLike) -> np.dtype[Any]:
        """The dtype of its dense numbers in a model of `dtype`."""
        return self.form.dtype(dtype) if isinstance(self.form, Dense) else np.dtype(dtype)

    def n_bytes(self, n_devices: int, itemsize: int) -> int:
        """The bytes on each of `n_devices`, in a model whose dtype has `itemsize` bytes."""
        return form_bytes(self.form, self.local_shape(n_devices), itemsize)

    def row_bytes(self, itemsize: int) -> int:
        """The bytes of a row of a table, in a model whose dtype has `itemsize` bytes."""
        return form_bytes(self.form, (1, *self.shape[1:]), itemsize)

    @property
    def counting_axes(self) -> tuple[int, ...]:
        """The axes that count matrices or vectors: "G+2", "X", "2"."""
        return tuple(i for i, axis in enumerate(self.axes) if _COUNT.fullmatch(axis))

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """The shape with counting axes ("G+2") merged into the next axis: [n] or [rows, columns]."""
        return self._stacked(self.shape)

    def local_stacked_shape(self, n_devices: int) -> tuple[int, ...]:
        """The stacked shape of each device's part."""
        return self._stacked(self.local_shape(n_devices))

    def local_shape(self, n_devices: int) -> tuple[int, ...]:
        """The shape of each device's part."""
        split = self.split_axis(n_devices)
        return tuple(-(-size // n_devices) if i == split else size for i, size in enumerate(self.shape))

    def split_axis(self, n_devices: int) -> int | None:
        """The axis that is split over `n_devices`; None where each of them holds the whole.

        Experts are split along their size while each device's share is EXPERT_SHARE or more: then all devices
        have the same work, whatever the routing. Smaller experts stay whole, and each device holds an equal
        number of them, if their number divides.
        """
        found = next((i for i, axis in enumerate(self.axes) if _is_split(axis)), None)
        if found is None or self.axes[0] != "X":
            return found
        whole = whole_experts(self.shape[found], self.shape[0], n_devices, packed=self.whole)
        return 0 if whole else found

    @property
    def takes_attention(self) -> bool:
        """Whether this matrix multiplies attention's result."""
        return self.use == "linear" and not _HEADS.isdisjoint(self.axes[-1])

    def _stacked(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        sizes: list[int] = []
        count = 1
        for axis, size in zip(self.axes, shape, strict=True):
            if _COUNT.fullmatch(axis):
                count *= size
            else:
                sizes.append(count * size)
                count = 1
        return tuple(sizes)

    def is_on(self, layers: range, n_layers: int) -> bool:
        """Whether the stage of these layers has it, if it is outside of layers."""
        first, last = layers.start == 0, layers.stop == n_layers
        return (first and self.stage != "last") or (last and self.stage != "first")


def whole_experts(size: int, number: int, n_devices: int, *, packed: bool) -> bool:
    """Whether each of `n_devices` holds whole ones of the `number` experts of this size."""
    wide = not packed and size % n_devices == 0 and size // n_devices >= EXPERT_SHARE
    return not wide and number % n_devices == 0


def _is_split(axis: str) -> bool:
    """Whether this axis is split over a stage's devices; for experts see Parameter.split_axis."""
    return not SPLIT.isdisjoint(axis)


def parameter_table(config: ModelConfig) -> dict[str, Parameter]:
    """All weights by name, in the order in which random weights are drawn."""
    return stage_parameters(config, range(config.n_layers))


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight."""
    return {name: parameter.shape for name, parameter in parameter_table(config).items()}


def stage_parameters(config: ModelConfig, layers: range) -> dict[str, Parameter]:
    """The weights of the stage of these layers."""
    before, after = _outside(config, layers, shared_weights(config))
    within = {
        f"{ENCODER}layers.{i}.{name}": parameter
        for i in encoder_layers_of(config, layers)
        for name, parameter in encoder_layer_parameters(config, i).items()
    } | {
        f"layers.{i}.{name}": parameter
        for i in layers
        for name, parameter in layer_parameters(config, i).items()
    }
    return before | within | after


def encoder_layers_of(config: ModelConfig, layers: range) -> range:
    """The encoder's layers on the stage of these decoder layers: all of them on the first stage.

    The encoder's states then move from stage to stage like everything else. Decode, which takes most of the
    time, is still shared evenly.
    """
    if config.encoder is None or layers.start:
        return range(0)
    return range(len(config.encoder.layers))


def outside_parameters(config: ModelConfig, layers: range, *, shared: bool = False) -> dict[str, Parameter]:
    """The weights outside of layers on the stage of these layers; `shared` includes `shared_weights`."""
    before, after = _outside(config, layers, () if shared else shared_weights(config))
    return before | after


def shared_weights(config: ModelConfig) -> tuple[str, ...]:
    """Weights that a head computes with and that are the served model's (`ReadStates`)."""
    reads = config.reads
    if reads is None:
        return ()
    every = ((TOKEN_EMBEDDING, reads.shares_embedding), (HEAD, reads.shares_head))
    return tuple(name for name, is_shared in every if is_shared)


def layer_parameters(config: ModelConfig, layer: int) -> dict[str, Parameter]:
    """The weights of one layer by their names in it; matrices in the order in which they are applied."""
    return _of_layer(config, config.layers[layer])


def encoder_layer_parameters(config: ModelConfig, layer: int) -> dict[str, Parameter]:
    """The weights of one encoder layer by their names in it."""
    assert config.encoder is not None
    return _of_layer(config, config.encoder.layers[layer])


def attention_of(config: ModelConfig, name: str) -> Attention:
    """The attention of the layer that a weight is in, or the model's first where that has none."""
    pattern, layer = in_layers(name)
    own = layers_with(config, pattern)[int(layer)].attention if layer else None
    return own or config.attention


def attention_sizes(attention: Attention) -> dict[str, int]:
    """The sizes of the letters of attention; those of latent attention only where it is latent."""
    sizes = {"G": attention.group, "K": attention.n_kv_heads, "D": attention.head_size}
    if (latent := attention.latent) is not None:
        sizes |= {
            **{"N": attention.n_heads, "Q": latent.query_size, "W": latent.value_size},
            **{"A": latent.query_rank or 0, "C": latent.rank, "L": latent.width},
            "M": latent.plain_size + latent.value_size,
        }
    if (indexer := attention.indexer) is not None:
        sizes |= {"q": indexer.n_heads * indexer.head_size, "k": indexer.head_size, "w": indexer.n_heads}
    return sizes


def packable_weights(config: ModelConfig) -> dict[str, Parameter]:
    """The weights that may have a form other than dense: matrices that products and look-ups alone read.

    Their shapes are those of dense weights, as far as `config` has no forms. The router, whose logits decide
    for all of a token, and latent attention's `kv_b`, which attention itself reads, are not among them. Nor
    is the matrix of index queries' weights, which is small and decides what a token sees.
    """
    return {
        name: one
        for name, one in parameter_table(config).items()
        if one.use in ("linear", "expert", "head") or name == TOKEN_EMBEDDING
        if not name.endswith(_READ_WHOLE)
    }


def _of_layer(config: ModelConfig, layer: Layer) -> dict[str, Parameter]:
    feed_forward = layer.feed_forward
    # The letters of heads are the model's: a recurrent layer has none of its own.
    sizes = _sizes(config) | attention_sizes(layer.attention or config.attention)
    found: dict[str, Parameter] = {}
    if layer.attention is not None:
        found |= _of_attention(layer, layer.attention, sizes)
    if layer.recurrence is not None:
        found |= _of_recurrence(layer, layer.recurrence, sizes)
    if feed_forward is not None:
        found |= _of_feed_forward(layer, feed_forward, sizes)
    if layer.beside is not None:
        found |= _of_feed_forward(layer, layer.beside, sizes)
    if layer.input_size is not None:
        sizes = {**sizes, "i": layer.input_size}
        found |= _linear(layer, sizes, "input_gate", ("i",), ("H",), bias=False)
        found |= _linear(layer, sizes, "input_out", ("H",), ("i",), bias=False)
    if layer.scalar:
        found["scalar"] = _parameter(("Z",), {**sizes, "Z": 1}, "ones", "bias")
    if layer.attention is not None:
        found |= _beside_attention(layer.attention, sizes)
    for name in layer.norms:
        found |= _norm(name, layer.norm, sizes)
    return found


def _linear(
    layer: Layer,
    sizes: Mapping[str, int],
    name: str,
    out: tuple[str, ...],
    into: tuple[str, ...],
    *,
    bias: bool,
) -> dict[str, Parameter]:
    """The weight of a linear layer in its form, and maybe its bias."""
    form = form_of(layer.forms, f"{name}.weight")
    if not isinstance(form, Dense) and into == ("G", "KD"):
        into = (FLAT_HEADS,)
    weight = _parameter((*out, *into), sizes, "normal", "linear")
    found = {f"{name}.weight": replace(weight, form=form)}
    if bias:
        found[f"{name}.bias"] = _parameter(out, sizes, "zeros", "bias")
    return found


def _of_attention(layer: Layer, attention: Attention, sizes: Mapping[str, int]) -> dict[str, Parameter]:
    """The projections of a layer's attention, and of its cross attention."""
    heads = ("KD",) if attention.group == 1 else ("G", "KD")
    cross, found = layer.cross, dict[str, Parameter]()

    def linear(
        name: str,
        out: tuple[str, ...],
        into: tuple[str, ...],
        bias: bool,
    ) -> None:
        found.update(_linear(layer, sizes, name, out, into, bias=bias))

    if (latent := attention.latent) is None:
        slices = "G+G+2" if attention.output_gate else ("G", "G+1", "G+2")[attention.kv_slices]
        into = "2H" if layer.residual == "joined" else "H"
        linear("qkv", (slices, "KD"), (into,), attention.qkv_bias)
        linear("out", ("H",), heads, attention.out_bias)
    else:
        if latent.query_rank is None:
            linear("q", ("NQ",), ("H",), False)
        else:
            linear("q_a", ("A",), ("H",), attention.qkv_bias)
            linear("q_b", ("NQ",), ("A",), False)
        linear("kv_a", ("L",), ("H",), attention.qkv_bias)
        if attention.indexer is not None and not attention.indexer.shared:
            linear("index_k", ("k",), ("H",), False)
            linear("index_q", ("q",), ("A",), False)
            linear("index_weights", ("w",), ("H",), False)
        linear("kv_b", ("NM",), ("C",), False)
        linear("out", ("H",), ("NW",), attention.out_bias)
    if cross is not None:
        linear("cross_q", ("KD",), ("H",), cross.qkv_bias)
        linear("cross_kv", ("2", "KD"), ("H",), cross.qkv_bias)
        linear("cross_out", ("H",), ("KD",), cross.out_bias)
    return found


def _beside_attention(attention: Attention, sizes: Mapping[str, int]) -> dict[str, Parameter]:
    """The other weights of attention: biases of scores, sinks and norms."""
    heads = ("KD",) if attention.group == 1 else ("G", "KD")
    latent, found = attention.latent, dict[str, Parameter]()
    if attention.scores.relative is not None:
        sizes = {**sizes, "U": attention.scores.relative.n_buckets}
        found["relative_bias"] = _parameter(("U", "K"), sizes, "normal", "bias")
    if attention.scores.sinks:
        found["sinks"] = _parameter(("K",) if attention.group == 1 else ("G", "K"), sizes, "normal", "bias")
    if attention.qk_norm is not None and attention.qk_norm.scaled:
        over_head = attention.qk_norm.over == "head"
        for name, axes in (("q_norm", heads), ("k_norm", ("KD",)))[: 1 if attention.kv_slices == 0 else 2]:
            found |= _norm(name, attention.qk_norm.norm, sizes, axes=("D",) if over_head else axes)
    if latent is not None:
        if latent.query_rank is not None:
            found |= _norm("q_a_norm", latent.norm, sizes, axes=("A",))
        found |= _norm("kv_a_norm", latent.norm, sizes, axes=("C",))
        if attention.indexer is not None and not attention.indexer.shared:
            found |= _norm("index_k_norm", attention.indexer.norm, sizes, axes=("k",))
    return found


def _of_recurrence(layer: Layer, own: Recurrence, sizes: Mapping[str, int]) -> dict[str, Parameter]:
    """The weights of a recurrent mixer; a convolution's [B, J] has the newest token's column last."""
    sizes = {**sizes, "B": own.channels, "J": own.width}
    match own:
        case ShortConvolution():
            into = _linear(layer, sizes, "conv_in", ("3", "B"), ("H",), bias=own.bias)
            rest = _linear(layer, sizes, "conv_out", ("H",), ("B",), bias=own.bias)
            conv_bias = own.bias
        case GatedDeltaNet():
            into, rest = _of_delta_net(layer, own, sizes)
            conv_bias = False
        case Mamba2():
            into, rest = _of_mamba2(layer, own, sizes)
            conv_bias = own.conv_bias
    found = {**into, "conv.weight": _parameter(("B", "J"), sizes, "normal", "bias")}
    if conv_bias:
        found["conv.bias"] = _parameter(("B",), sizes, "zeros", "bias")
    return found | rest


def share_rows(config: ModelConfig, name: str) -> tuple[int, ...] | None:
    """The checkpoint's row of each row of a weight; None where they are the same.

    Shares of a recurrent mixer follow one another, each with its part of every kind of row. Devices that
    share a group of Mamba-2 have its rows of B and C each.
    """
    pattern, layer = in_layers(name)
    own = layers_with(config, pattern)[int(layer)].recurrence if layer else None
    if own is None or isinstance(own, ShortConvolution) or own.n_shares == 1:
        return None
    weight = pattern.rpartition("{i}.")[2].rpartition(".")[0]
    if weight == "conv" or (isinstance(own, GatedDeltaNet) and weight == "delta_in" and not own.by_key_head):
        return _rows_by_share(own.channel_segments, own.n_shares)
    if isinstance(own, Mamba2) and weight == "space_in":
        return _rows_by_share(own.row_segments, own.n_shares)
    return None


def runs_of(rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of neighbouring rows among `rows`: the place in `rows`, the first row, and how many."""
    runs: list[tuple[int, int, int]] = []
    for at, row in enumerate(rows):
        if runs and row == sum(runs[-1][1:]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((at, row, 1))
    return runs


@lru_cache(maxsize=64)
def _rows_by_share(segments: Segments, n_shares: int) -> tuple[int, ...]:
    rows: list[int] = []
    for share in range(n_shares):
        begin = 0
        for n, size in segments:
            first = begin + share * n // n_shares * size
            rows += range(first, first + max(1, n // n_shares) * size)
            begin += n * size
    return tuple(rows)


_Parts = tuple[dict[str, Parameter], dict[str, Parameter]]  # before the convolution, and after it


def _of_delta_net(layer: Layer, own: GatedDeltaNet, sizes: Mapping[str, int]) -> _Parts:
    """`delta_in` has rows of queries, keys and values, and by key head also of gates; see GatedDeltaNet."""
    n = own.n_value_heads
    rows = own.channels + own.values if own.by_key_head else own.channels
    sizes = {**sizes, "I": rows, "O": own.values, "R": n, "T": own.value_size}
    into = _linear(layer, sizes, "delta_in", ("I",), ("H",), bias=False)
    others = {"delta_gates": "2R"} if own.by_key_head else {"delta_z": "O", "delta_b": "R", "delta_a": "R"}
    for name, axis in others.items():
        into |= _linear(layer, sizes, name, (axis,), ("H",), bias=False)
    rest = {f"delta.{name}": _parameter(("R",), sizes, "normal", "bias") for name in ("decay", "step_bias")}
    rest |= _norm("delta_norm", own.norm, sizes, axes=("T",))
    return into, rest | _linear(layer, sizes, "delta_out", ("H",), ("O",), bias=False)


def _of_mamba2(layer: Layer, own: Mamba2, sizes: Mapping[str, int]) -> _Parts:
    """`space_in` has rows of gates, x, B, C and steps."""
    sizes = {**sizes, "I": own.inner + own.channels + own.n_heads, "O": own.inner, "R": own.n_heads}
    names = ("decay", "step_bias", "skip")
    rest = {f"space.{name}": _parameter(("R",), sizes, "normal", "bias") for name in names}
    if own.norm is not None:
        rest |= _norm("space_norm", own.norm, sizes, axes=("O",))
    into = _linear(layer, sizes, "space_in", ("I",), ("H",), bias=own.bias)
    out_bias = own.bias if own.out_bias is None else own.out_bias
    return into, rest | _linear(layer, sizes, "space_out", ("H",), ("O",), bias=out_bias)


def _of_feed_forward(layer: Layer, own: FeedForward, sizes: Mapping[str, int]) -> dict[str, Parameter]:
    """The weights of a dense feed-forward, or of experts."""
    sizes = {**sizes, "F": own.size, "Z": _XIELU_NUMBERS}
    if own.experts is not None:
        return _of_experts(layer, own, own.experts, sizes)
    into = ("2", "F") if own.gated else ("F",)
    found = _linear(layer, sizes, "up", into, ("H",), bias=own.bias)
    found |= _linear(layer, sizes, "down", ("H",), ("F",), bias=own.bias)
    if own.activation == "xielu":
        found["xielu"] = _parameter(("Z",), sizes, "zeros", "bias")
    return found


def _of_experts(
    layer: Layer, feed_forward: FeedForward, experts: Experts, sizes: Mapping[str, int]
) -> dict[str, Parameter]:
    """The weights of the router, the experts, the shared expert, and around the experts' latent space."""
    whole, latent = layer.has_whole_experts, experts.latent_size
    sizes = {**sizes, "X": experts.number, "Y": experts.number, "S": experts.shared_size or 0}
    sizes["h"] = latent or sizes["H"]
    width = "H" if latent is None else "h"
    gated = ("2",) if feed_forward.gated else ()
    found = {"router.weight": _parameter(("Y", "H"), sizes, "normal", "linear")}
    if experts.router_bias:
        found["router.bias"] = _parameter(("Y",), sizes, "zeros", "bias")
    if experts.correction_bias:
        found["router.correction"] = replace(_parameter(("Y",), sizes, "zeros", "bias"), form=EXACT)
    if latent is not None:
        found |= _linear(layer, sizes, "latent.down", ("h",), ("H",), bias=False)
    for name, out, into in (("up", ("X", *gated, "F"), width), ("down", ("X", width), "F")):
        weight = _parameter((*out, into), sizes, "normal", "expert")
        form = experts.form if experts.packed else form_of(layer.forms, f"experts.{name}.weight")
        found[f"experts.{name}.weight"] = replace(weight, form=form, whole=whole)
        if feed_forward.bias:
            bias = _parameter(out, sizes, "zeros", "bias")
            found[f"experts.{name}.bias"] = replace(bias, whole=whole)
    if latent is not None:
        found |= _linear(layer, sizes, "latent.up", ("H",), ("h",), bias=False)
    if experts.shared_size is not None:
        for name, axes in (("up", (*gated, "S", "H")), ("down", ("H", "S"))):
            weight = _parameter(axes, sizes, "normal", "linear")
            form = form_of(layer.forms, f"shared.{name}.weight")
            found[f"shared.{name}.weight"] = replace(weight, form=form)
    if experts.router_norm is not None:
        found["router_norm.scale"] = _parameter(("H",), sizes, "ones", "norm")
    if experts.scaled:
        found["router.scales"] = _parameter(("Y",), sizes, "ones", "bias")
    if experts.shared_gate:
        found["shared.gate"] = _parameter(("H",), sizes, "normal", "bias")
    return found


@lru_cache(maxsize=4096)
def stage_elements(config: ModelConfig, layers: range, n_devices: int) -> int:
    """Elements of weights on each of a stage's `n_devices`."""
    return _sum_over_stage(config, layers, lambda one: math.prod(one.local_shape(n_devices)))


@lru_cache(maxsize=4096)
def stage_bytes(config: ModelConfig, layers: range, n_devices: int, itemsize: int) -> int:
    """Bytes of weights on each of a stage's `n_devices`."""
    return _sum_over_stage(config, layers, lambda one: one.n_bytes(n_devices, itemsize))


def _sum_over_stage(config: ModelConfig, layers: range, count: Callable[[Parameter], int]) -> int:
    """Sum `count` over the weights of a stage, evaluating equal layers once."""
    encoding = config.encoder.layers if config.encoder else ()
    every = [config.layers[i] for i in layers] + [encoding[i] for i in encoder_layers_of(config, layers)]
    alike = [[*group] for _, group in groupby(every)]
    return sum(map(count, outside_parameters(config, layers).values())) + sum(
        len(group) * sum(map(count, _of_layer(config, group[0]).values())) for group in alike
    )


def layers_with(config: ModelConfig, name: str) -> tuple[Layer, ...]:
    """The layers among which a weight of this name is numbered: the encoder's or the decoder's."""
    return config.encoder.layers if config.encoder and name.startswith(ENCODER) else config.layers


def in_layers(name: str) -> tuple[str, str]:
    """Split a weight's name into its pattern with {i}, and its layer's number, "" outside of layers."""
    layer = _LAYER.match(name)
    return _LAYER.sub(r"\1layers.{i}.", name), layer[2] if layer else ""


def _outside(
    config: ModelConfig, layers: range, left_out: Collection[str]
) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
    """Non-layer weights initialised before the layers, and after, but for those that are `left_out`."""
    sizes = _sizes(config)
    tied = config.embedding.tied
    before = dict[str, Parameter]()
    stage: Stage = "both" if tied else "first"
    before[TOKEN_EMBEDDING] = _parameter(("V", "E"), sizes, "normal", "embedding", stage)
    if config.positions is not None:
        before["position_embedding"] = _parameter(("P", "H"), sizes, "normal", "embedding", "first")
    if config.embedding.n_segments:
        own = sizes | {"t": config.embedding.n_segments}
        before["segment_embedding"] = _parameter(("t", "H"), own, "normal", "embedding", "first")
    if config.embedding.norm is not None:
        before |= _norm("embedding_norm", config.embedding.norm, sizes, "first")
    encoder = config.encoder
    if encoder is not None and encoder.positions is not None:
        own = sizes | {"P": encoder.n_positions + encoder.positions.offset}
        before[f"{ENCODER}position_embedding"] = _parameter(("P", "H"), own, "normal", "embedding", "first")
    if encoder is not None and encoder.embedding_norm is not None:
        before |= _norm(f"{ENCODER}embedding_norm", encoder.embedding_norm, sizes, "first")
    if config.input_size is not None:
        own = sizes | {"i": config.input_size, "e": config.n_layers * config.input_size}
        before["inputs.embedding"] = _parameter(("V", "e"), own, "normal", "embedding", "first")
        before["inputs.project"] = _parameter(("e", "H"), own, "normal", "linear", "first")
        before |= _norm("inputs.norm", config.layers[0].norm, own, "first", axes=("i",))
    if config.embedding.size != config.hidden_size:
        before["project_in"] = _parameter(("H", "E"), sizes, "normal", "linear", "first")
        before["project_out"] = _parameter(("E", "H"), sizes, "normal", "linear", "last")
    if config.reads is not None:
        before |= _of_states(config, config.reads, sizes)
    after = {} if config.final_norm is None else _norm("final_norm", config.final_norm, sizes, "last")
    if encoder is not None and encoder.final_norm is not None:
        after |= _norm(f"{ENCODER}final_norm", encoder.final_norm, sizes, "first")
    if config.ranker:
        own = sizes | {"r": config.pooled_size}
        head = config.ranker_head
        layers_of_it = [("ranker.dense", ("H", "H"), head.bias)] if head.kind == "pooler" else []
        layers_of_it += [] if head.kind == "tokens" else [("ranker.out", ("r", "H"), head.kind == "pooler")]
        for name, axes, bias in layers_of_it:
            after[f"{name}.weight"] = _parameter(axes, own, "normal", "linear", "last")
            if bias:
                after[f"{name}.bias"] = _parameter(axes[:1], own, "zeros", "bias", "last")
        after |= {} if head.norm is None else _norm("ranker.norm", head.norm, sizes, "last")
    n_drafted = None if config.reads is None else config.reads.n_drafted
    if n_drafted is not None:
        own = sizes | {"v": n_drafted}
        after[HEAD] = _parameter(("v", "E"), own, "normal", "head", "last")
        after[HEAD_OFFSETS] = replace(_parameter(("v",), own, "zeros", "bias", "last"), form=EXACT)
    elif not tied:
        after[HEAD] = _parameter(("V", "E"), sizes, "normal", "head", "last")
    if config.head_bias:
        after[HEAD_BIAS] = _parameter(("V",), sizes, "zeros", "bias", "last")

    def on_stage(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
        return {
            name: replace(one, form=form_of(config.forms, name)) if config.forms else one
            for name, one in parameters.items()
            if one.is_on(layers, config.n_layers) and name not in left_out
        }

    return on_stage(before), on_stage(after)


def _of_states(config: ModelConfig, reads: ReadStates, sizes: Mapping[str, int]) -> dict[str, Parameter]:
    """The weights with which a head takes a token's embedding and the states before it."""
    sizes = {**sizes, "s": reads.width}
    fused = reads.kind == "eagle3"
    norms = [("states.embedding_norm", "H"), ("states.norm", "H" if fused else "s")]
    norms += [("states.input_norm", "s")] if reads.norm_states else []
    found = dict[str, Parameter]()
    for name, axis in norms:
        found |= _norm(name, config.layers[0].norm, sizes, "first", axes=(axis,))
    into = "s" if fused else "H+s"
    return found | {"states.project": _parameter(("H", into), sizes, "normal", "linear", "first")}


def _norm(
    name: str,
    norm: Norm,
    sizes: Mapping[str, int],
    stage: Stage | None = None,
    axes: tuple[str, ...] = ("H",),
) -> dict[str, Parameter]:
    initial: Initial = "zeros" if norm.unit_offset else "ones"
    parameters = {f"{name}.scale": _parameter(axes, sizes, initial, "norm", stage)}
    if norm.has_bias:
        parameters[f"{name}.bias"] = _parameter(axes, sizes, "zeros", "norm", stage)
    return parameters


def _sizes(config: ModelConfig) -> dict[str, int]:
    return {
        "V": config.padded_vocab_size,
        "E": config.embedding.size,
        "P": config.n_positions
        - config.is_bidirectional
        + (config.positions.offset if config.positions else 0),
        "H": config.hidden_size,
    }


def _parameter(
    axes: tuple[str, ...], sizes: Mapping[str, int], initial: Initial, use: Use, stage: Stage | None = None
) -> Parameter:
    return Parameter(axes, tuple(_size(axis, sizes) for axis in axes), initial, use, stage)


def _size(axis: str, sizes: Mapping[str, int]) -> int:
    """The size of an axis such as "KD" or "G+2"."""
    return sum(
        math.prod(int(letter) if letter.isdigit() else sizes[letter] for letter in term)
        for term in axis.split("+")
    )
