"""The weights of a model: their names, shapes, split, initial values and stages. No other file has a shape.

An axis is written in letters, and its size is their product; a digit stands for itself, + for a sum:

    V  rows of the vocabulary, padded     E  embedding size     P  rows of the position table
    H  hidden size                        K  key/value heads    D  head size
    G  query heads of each K/V head       F  feed-forward size     U  buckets of a relative bias
    X  experts, each with a matrix        Y  the same, each with a row of the router
    S  size of the shared expert
    N  query heads of latent attention    Q  size of a head's query      W  size of its value
    A  rank of compressed queries         C  rank of compressed keys and values
    L  C, and what is rotated             M  a head's key but for what is rotated, and its value

Matrices are [out, in]. An axis with one of the letters in SPLIT is split over a stage's devices (ORCA 4.1,
Figure 6): QKV and up projections by their columns, that is by heads and by feed-forward units, out and down
projections by the same as their rows, embedding and head by vocabulary. So a layer needs two sums over the
devices, after `out` and after `down`.

Heads are group-major, so that a device's share of K brings each K/V head with its own query heads. Of `qkv`
[G + 2, K D, H] slices 0 to G - 1 are queries, slice G keys and slice G + 1 values; slice g, head k is query
head k * G + g of a checkpoint. The input of `out` [H, G, K D] has the same order. With one query head for
each K/V head these are [3, K D, H] and [H, K D]. A gated `up` [2, F, H] has the gate, then up. `cross_kv`
[2, K D, H] has the keys, then the values.

Latent attention has its heads in a checkpoint's order: `q_b` [N Q, A] (without compression `q` [N Q, H]), for
each head the elements that are not rotated, then the others; `kv_b` [N M, C], for each head what makes its
key, then its value. `q_a` [A, H] and `kv_a` [L, H] compress; each device has the whole of them.

Of experts the devices have either a share of each one's F, or as many whole ones: `split_axis` has the rule,
which looks at the sizes alone. Either way one sum after them will do (model/token_slices.py has another).

An encoder's layers are `encoder.layers.{i}`; the first stage has all of them beside its decoder layers.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from orca_jax.families.attention_matrices import attention_matrices, latent_sizes
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import FeedForward, Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.weight_form import DENSE, EXACT, Dense, HeldArray, WeightForm, form_bytes

SPLIT = frozenset("VKFSN")
_HEADS = frozenset("KN")
# A part of an expert that keeps a matrix unit busy: one tile of a GPU's, eight vectors of a CPU's.
EXPERT_SHARE = 128
TOKEN_EMBEDDING, HEAD, HEAD_BIAS = "token_embedding", "head.weight", "head.bias"

Initial = Literal["normal", "ones", "zeros"]  # normal: with deviation 0.02, as GPT-2 was initialised
Use = Literal["embedding", "linear", "expert", "bias", "norm", "head"]
Stage = Literal["first", "last", "both"]  # both: the first and the last

_NO_PRODUCT = frozenset({"kv_b"})  # matrices of linear layers that attention reads itself, and so dense
_COUNT = re.compile(r"[GX\d+]+")  # an axis that counts matrices
_LAYER = re.compile(r"(encoder\.)?layers\.(\d+)\.")
ENCODER = "encoder."


@dataclass(frozen=True, slots=True)
class Parameter:
    """One weight. `shape` has a size for each of `axes`; `stage` is None for a weight of a layer.

    `whole`: each device has whole experts, whatever their size. `form` says in which arrays it is held.
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
        """The number of its last axes that are inputs of a matrix."""
        return len(self.axes) - 1 if self.takes_attention else 1

    def array_to_read(self, dtype: npt.DTypeLike) -> HeldArray:
        """The array that a checkpoint has: the only one of its form, or the dense one, to be encoded."""
        form = self.form if self.form.stored else DENSE
        (array,) = form.arrays(self.shape, self.n_in, dtype).values()
        return array

    def held_arrays(self, dtype: npt.DTypeLike) -> Mapping[str, HeldArray]:
        """The arrays that hold it in a model of `dtype`, by their names in its form."""
        return self.form.arrays(self.shape, self.n_in, dtype)

    def dense_dtype(self, dtype: npt.DTypeLike) -> np.dtype[Any]:
        """The dtype of its numbers where they are dense, in a model of `dtype`."""
        return self.form.dtype(dtype) if isinstance(self.form, Dense) else np.dtype(dtype)

    def n_bytes(self, n_devices: int, itemsize: int) -> int:
        """The bytes that each of `n_devices` holds, in a model whose dtype has `itemsize` bytes."""
        return form_bytes(self.form, self.local_shape(n_devices), self.n_in, itemsize)

    @property
    def counting_axes(self) -> tuple[int, ...]:
        """The axes that count matrices or vectors: "G+2", "X", "2"."""
        return tuple(i for i, axis in enumerate(self.axes) if _COUNT.fullmatch(axis))

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """The shape with a counting axis ("G+2") and the next one taken as one: [n] or [rows, columns]."""
        return self._stacked(self.shape)

    def local_stacked_shape(self, n_devices: int) -> tuple[int, ...]:
        """The stacked shape of each device's part."""
        return self._stacked(self.local_shape(n_devices))

    def local_shape(self, n_devices: int) -> tuple[int, ...]:
        """The shape of each device's part."""
        split = self.split_axis(n_devices)
        return tuple(-(-size // n_devices) if i == split else size for i, size in enumerate(self.shape))

    def split_axis(self, n_devices: int) -> int | None:
        """The axis that `n_devices` share; None where each of them has the whole.

        Experts are split along their size while each device's share is EXPERT_SHARE or more: then all devices
        have the same work, whatever the routing. Smaller ones stay whole, and each device has as many, where
        their number allows it.
        """
        found = next((i for i, axis in enumerate(self.axes) if _is_split(axis)), None)
        if found is None or self.axes[0] != "X":
            return found
        whole = whole_experts(self.shape[found], self.shape[0], n_devices, packed=self.whole)
        return 0 if whole else found

    @property
    def takes_attention(self) -> bool:
        """Whether this matrix multiplies what attention returns."""
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
        """Whether the stage of these layers has it, for a weight outside of layers."""
        first, last = layers.start == 0, layers.stop == n_layers
        return (first and self.stage != "last") or (last and self.stage != "first")


def whole_experts(size: int, number: int, n_devices: int, *, packed: bool) -> bool:
    """Whether each of `n_devices` has whole experts, of which there are `number` of that size."""
    wide = not packed and size % n_devices == 0 and size // n_devices >= EXPERT_SHARE
    return not wide and number % n_devices == 0


def _is_split(axis: str) -> bool:
    """Whether a stage's devices share this axis, unless it is experts' (Parameter.split_axis)."""
    return not SPLIT.isdisjoint(axis)


def parameter_table(config: ModelConfig) -> dict[str, Parameter]:
    """All weights by name, in the order in which random ones are drawn."""
    return stage_parameters(config, range(config.n_layers))


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight."""
    return {name: parameter.shape for name, parameter in parameter_table(config).items()}


def stage_parameters(config: ModelConfig, layers: range) -> dict[str, Parameter]:
    """The weights that the stage of these layers has."""
    before, after = _outside(config, layers)
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
    """The encoder's layers of the stage with these layers of the decoder: all of them on the first.

    So what the encoder makes goes from stage to stage in the direction of everything else. In decode, where
    most time goes, the stages have equal shares.
    """
    if config.encoder is None or layers.start:
        return range(0)
    return range(len(config.encoder.layers))


def outside_parameters(config: ModelConfig, layers: range) -> dict[str, Parameter]:
    """The weights that the stage of these layers has outside of layers."""
    before, after = _outside(config, layers)
    return before | after


def layer_parameters(config: ModelConfig, layer: int) -> dict[str, Parameter]:
    """The weights of one layer, by their names in it; matrices in the order in which a token meets them."""
    return _of_layer(config, config.layers[layer])


def encoder_layer_parameters(config: ModelConfig, layer: int) -> dict[str, Parameter]:
    """The weights of one of the encoder's layers, by their names in it."""
    assert config.encoder is not None
    return _of_layer(config, config.encoder.layers[layer])


def _of_layer(config: ModelConfig, own: Layer) -> dict[str, Parameter]:
    attention, cross, feed_forward = own.attention, own.cross, own.feed_forward
    sizes = _sizes(config) | {"F": feed_forward.size} | latent_sizes(attention)
    heads = ("KD",) if attention.group == 1 else ("G", "KD")
    inner = ("2", "F") if feed_forward.gated else ("F",)
    found: dict[str, Parameter] = {}
    crossing = cross and (
        ("cross_q", ("KD",), ("H",), cross.qkv_bias),
        ("cross_kv", ("2", "KD"), ("H",), cross.qkv_bias),
        ("cross_out", ("H",), ("KD",), cross.out_bias),
    )
    for name, out, into, bias in (
        *attention_matrices(attention),
        *(crossing or ()),
        *(
            ()
            if feed_forward.experts
            else (("up", inner, ("H",), feed_forward.bias), ("down", ("H",), ("F",), feed_forward.bias))
        ),
    ):
        weight = _parameter((*out, *into), sizes, "normal", "linear")
        found[f"{name}.weight"] = weight if name in _NO_PRODUCT else replace(weight, form=config.linear_form)
        if bias:
            found[f"{name}.bias"] = _parameter(out, sizes, "zeros", "bias")
    if feed_forward.experts is not None:
        found |= _of_experts(feed_forward, feed_forward.experts, sizes, config.linear_form)
    if attention.scores.relative is not None:
        sizes["U"] = attention.scores.relative.n_buckets
        found["relative_bias"] = _parameter(("U", "K"), sizes, "normal", "bias")
    if attention.scores.sinks:
        found["sinks"] = _parameter(("K",) if attention.group == 1 else ("G", "K"), sizes, "normal", "bias")
    if attention.qk_norm is not None:
        over_head = attention.qk_norm.over == "head"
        for name, axes in (("q_norm", heads), ("k_norm", ("KD",))):
            found |= _norm(name, attention.qk_norm.norm, sizes, axes=("D",) if over_head else axes)
    if attention.latent is not None:
        for name, axis, there in (("q_a_norm", "A", sizes["A"]), ("kv_a_norm", "C", True)):
            found |= _norm(name, attention.latent.norm, sizes, axes=(axis,)) if there else {}
    for name in own.norms:
        found |= _norm(name, own.norm, sizes)
    return found


def _of_experts(
    own: FeedForward, experts: Experts, sizes: Mapping[str, int], form: WeightForm
) -> dict[str, Parameter]:
    """The router, the experts, and what all tokens share."""
    sizes = {**sizes, "X": experts.number, "Y": experts.number, "S": experts.shared_size or 0}
    inner = ("X", "2", "F") if own.gated else ("X", "F")
    found = {"router.weight": _parameter(("Y", "H"), sizes, "normal", "linear")}
    if experts.router_bias:
        found["router.bias"] = _parameter(("Y",), sizes, "zeros", "bias")
    if experts.correction_bias:
        found["router.correction"] = replace(_parameter(("Y",), sizes, "zeros", "bias"), form=EXACT)
    for name, out, into in (("up", inner, "H"), ("down", ("X", "H"), "F")):
        weight = _parameter((*out, into), sizes, "normal", "expert")
        found[f"experts.{name}.weight"] = replace(weight, form=experts.form, whole=experts.packed)
        if own.bias:
            bias = _parameter(out, sizes, "zeros", "bias")
            found[f"experts.{name}.bias"] = replace(bias, whole=experts.packed)
    if experts.shared_size is not None:
        for name, axes in (("up", ("2", "S", "H")), ("down", ("H", "S"))):
            weight = _parameter(axes, sizes, "normal", "linear")
            found[f"shared.{name}.weight"] = replace(weight, form=form)
    if experts.shared_gate:
        found["shared.gate"] = _parameter(("H",), sizes, "normal", "bias")
    return found


@lru_cache(maxsize=4096)
def stage_elements(config: ModelConfig, layers: range, n_devices: int) -> int:
    """Elements of weights on each of the `n_devices` of the stage of these layers."""
    return _sum_over_stage(config, layers, lambda one: math.prod(one.local_shape(n_devices)))


@lru_cache(maxsize=4096)
def stage_bytes(config: ModelConfig, layers: range, n_devices: int, itemsize: int) -> int:
    """Bytes of weights on each of the `n_devices` of the stage of these layers."""
    return _sum_over_stage(config, layers, lambda one: one.n_bytes(n_devices, itemsize))


def _sum_over_stage(config: ModelConfig, layers: range, count: Callable[[Parameter], int]) -> int:
    """The sum of `count` over the weights of a stage; layers that are alike are counted once."""
    encoding = config.encoder.layers if config.encoder else ()
    every = [config.layers[i] for i in layers] + [encoding[i] for i in encoder_layers_of(config, layers)]
    alike = [[*group] for _, group in groupby(every)]
    return sum(map(count, outside_parameters(config, layers).values())) + sum(
        len(group) * sum(map(count, _of_layer(config, group[0]).values())) for group in alike
    )


def layers_with(config: ModelConfig, name: str) -> tuple[Layer, ...]:
    """The layers that a weight of this name is counted in: the encoder's, or the decoder's."""
    return config.encoder.layers if config.encoder and name.startswith(ENCODER) else config.layers


def in_layers(name: str) -> tuple[str, str]:
    """A weight's name with {i} for its layer's number, and that number; "" outside of layers."""
    layer = _LAYER.match(name)
    return _LAYER.sub(r"\1layers.{i}.", name), layer[2] if layer else ""


def _outside(config: ModelConfig, layers: range) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
    """Non-layer weights initialised before the layers, and after."""
    sizes = _sizes(config)
    tied = config.embedding.tied
    before = {
        TOKEN_EMBEDDING: _parameter(("V", "E"), sizes, "normal", "embedding", "both" if tied else "first")
    }
    if config.positions is not None:
        before["position_embedding"] = _parameter(("P", "H"), sizes, "normal", "embedding", "first")
    if config.embedding.norm is not None:
        before |= _norm("embedding_norm", config.embedding.norm, sizes, "first")
    encoder = config.encoder
    if encoder is not None and encoder.positions is not None:
        own = sizes | {"P": encoder.n_positions + encoder.positions.offset}
        before[f"{ENCODER}position_embedding"] = _parameter(("P", "H"), own, "normal", "embedding", "first")
    if encoder is not None and encoder.embedding_norm is not None:
        before |= _norm(f"{ENCODER}embedding_norm", encoder.embedding_norm, sizes, "first")
    if config.embedding.size != config.hidden_size:
        before["project_in"] = _parameter(("H", "E"), sizes, "normal", "linear", "first")
        before["project_out"] = _parameter(("E", "H"), sizes, "normal", "linear", "last")
    after = {} if config.final_norm is None else _norm("final_norm", config.final_norm, sizes, "last")
    if encoder is not None and encoder.final_norm is not None:
        after |= _norm(f"{ENCODER}final_norm", encoder.final_norm, sizes, "first")
    if not tied:
        after[HEAD] = _parameter(("V", "E"), sizes, "normal", "head", "last")
    if config.head_bias:
        after[HEAD_BIAS] = _parameter(("V",), sizes, "zeros", "bias", "last")

    def on_stage(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
        return {name: one for name, one in parameters.items() if one.is_on(layers, config.n_layers)}

    return on_stage(before), on_stage(after)


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
        "P": config.n_positions + (config.positions.offset if config.positions else 0),
        "H": config.hidden_size,
        "G": config.attention.group,
        "K": config.n_kv_heads,
        "D": config.head_size,
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
