"""The storage of one of our weights in a checkpoint: tensors' names, their layout, the order of heads."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from orca_jax.families.attention_config import Attention
from orca_jax.families.parameters import FLAT_HEADS, Parameter
from orca_jax.families.trainers.array_form import ArrayForm

# How a checkpoint orders the heads of a weight; query head h uses K/V head h // G.
#   separate  three tensors: queries, keys, values
#   fused     one tensor: all queries, all keys, all values
#   by_group  one tensor: for each K/V head its queries, its key, its value
#   slices    one tensor in our order, for the checkpoint's own number of K/V heads
#   gated     separate, with each query followed by its output gate
#   gated_slices   one tensor in our order, with output gates
#   queries   one tensor with query heads alone
#   keys      one tensor with key heads alone
#   query_slices   one tensor with query heads alone, in our order
HeadOrder = Literal[
    "separate", "fused", "by_group", "slices", "gated", "gated_slices", "queries", "keys", "query_slices"
]


@dataclass(frozen=True, slots=True)
class StoredName:
    """The tensors of a weight in a checkpoint.

    `names` are one tensor, or several that are stacked along the weight's first axis; "{i}" is the layer's
    number, and "{x}" an expert's: then each expert has these tensors. With `transpose` they are stored [in,
    out], and with `reshape` neighbouring axes merge into one of ours. `heads` is the order of heads, ours by
    default. `one_row` is a vector stored as a matrix of one row, and `depthwise` a convolution's [C, W]
    stored [C, 1, W]; `whole_numbers` are stored as integers. The last `n_scalars` tensors are numbers without
    an axis.

    With `by_expert` the tensors have an axis of experts before all others. Then `alternating` interleaves the
    rows of gate and up, and `mxfp4` is a pair of tensors with packed numbers and the scale of each 32.
    `forms`, one for each of `names`, describe arrays with more axes instead.
    """

    names: tuple[str, ...]
    transpose: bool = False
    reshape: bool = False
    heads: HeadOrder | None = None
    forms: tuple[ArrayForm, ...] = ()
    one_row: bool = False
    n_scalars: int = 0
    depthwise: bool = False
    whole_numbers: bool = False
    by_expert: bool = False
    alternating: bool = False
    mxfp4: bool = False

    def in_layer(self, layer: str, prefix: str = "") -> "StoredName":
        """Fill in the layer's number for "{i}" and `prefix` for "{prefix}"."""
        names = tuple(name.replace("{i}", layer).replace("{prefix}", prefix) for name in self.names)
        return replace(self, names=names)

    def for_attention(self, attention: Attention | None) -> "StoredName":
        """Leave out separate tensors of values, or of keys and values, that the layer does not have."""
        if self.heads != "separate" or attention is None:
            return self
        return replace(self, names=self.names[: 1 + attention.kv_slices])

    def for_experts(self, number: int) -> "StoredName":
        """Fill in each of `number` experts for "{x}"."""
        if not any("{x}" in name for name in self.names):
            return self
        every = (name.replace("{x}", str(x)) for x in range(number) for name in self.names)
        return replace(self, names=tuple(every))


@dataclass(frozen=True, slots=True)
class HeadPlace:
    """The place of one of our heads in a checkpoint: which tensor, and which head of it."""

    tensor: int
    head: int


def head_places(order: HeadOrder, attention: Attention) -> list[list[HeadPlace]]:
    """The place of each of the K heads of each slice of the weight (parameters.py)."""
    repeats, n_heads, n_kv_heads = attention.kv_repeats, attention.n_heads, attention.n_kv_heads
    stored = n_kv_heads // repeats  # K/V heads of the checkpoint
    group = n_heads // stored
    gated = order in ("gated", "gated_slices")

    def place(slice_: int, k: int) -> HeadPlace:
        key = k // repeats
        is_gate = gated and slice_ < attention.group  # gates' slices are before those of queries
        slice_ -= attention.group * (gated and not is_gate)
        if order == "keys":
            return HeadPlace(0, key)
        head = k * attention.group + slice_
        kind = max(0, slice_ - attention.group + 1)  # 0: a query; 1: a key; 2: a value
        match order:
            case "queries":
                return HeadPlace(0, head)
            case "slices" | "query_slices":
                at = group + kind - 1 if kind else head % group
                return HeadPlace(0, at * stored + (key if kind else head // group))
            case "gated_slices":
                at = 2 * group + kind - 1 if kind else head % group + group * (not is_gate)
                return HeadPlace(0, at * stored + (key if kind else head // group))
            case "gated":
                return HeadPlace(kind, key) if kind else HeadPlace(0, 2 * head + is_gate)
            case "separate":
                return HeadPlace(kind, key if kind else head)
            case "fused":
                return HeadPlace(0, n_heads + (kind - 1) * stored + key if kind else head)
            case "by_group":
                at = group + kind - 1 if kind else head % group
                return HeadPlace(0, (key if kind else head // group) * (group + 2) + at)

    n_queries = {"queries": attention.group, "query_slices": attention.group, "keys": 1}
    n_slices = n_queries.get(order, (1 + gated) * attention.group + attention.kv_slices)
    return [[place(slice_, k) for k in range(n_kv_heads)] for slice_ in range(n_slices)]


def flat_places(order: HeadOrder, attention: Attention) -> tuple[HeadPlace, ...]:
    """The place of each query head, in the order of heads."""
    by_slice = head_places(order, attention)
    return tuple(
        by_slice[head % attention.group][head // attention.group] for head in range(attention.n_heads)
    )


def heads_of_tensors(order: HeadOrder, attention: Attention) -> tuple[int, ...]:
    """The number of heads in each of the checkpoint's tensors."""
    n_heads, stored = attention.n_heads, attention.n_kv_heads // attention.kv_repeats
    match order:
        case "separate":
            return (n_heads, stored, stored)[: 1 + attention.kv_slices]
        case "gated":
            return 2 * n_heads, stored, stored
        case "gated_slices":
            return (2 * n_heads + 2 * stored,)
        case "fused" | "by_group" | "slices":
            return (n_heads + attention.kv_slices * stored,)
        case "queries" | "query_slices":
            return (n_heads,)
        case "keys":
            return (stored,)


def engine_order(parameter: Parameter, attention: Attention) -> HeadOrder | None:
    """Our order of a parameter's heads; None where it has no heads, or all orders are the same."""
    if attention.group == 1 or attention.latent is not None or parameter.axes[-1] == FLAT_HEADS:
        return None
    if parameter.axes[0] in ("G+2", "G+1"):
        return "slices"
    if parameter.axes[0] == "G+G+2":
        return "gated_slices"
    if parameter.takes_attention or parameter.axes[:2] in (("G", "KD"), ("G", "K")):
        return "query_slices"
    return "keys" if parameter.axes == ("KD",) else None


def size_of_heads(parameter: Parameter, attention: Attention) -> int:
    """The elements of a parameter for each head: 1 for sinks."""
    return attention.head_size if any("D" in axis for axis in parameter.axes) else 1


def as_it_is(name: str) -> StoredName:
    """One tensor of the weight's shape."""
    return StoredName((name,))


def transposed(name: str) -> StoredName:
    """One matrix, stored [in, out]."""
    return StoredName((name,), transpose=True)


def one_row(name: str) -> StoredName:
    """A vector, stored as a matrix [1, n]."""
    return StoredName((name,), one_row=True)


def numbers(place: str, *, vectors: tuple[str, ...], scalars: tuple[str, ...]) -> StoredName:
    """Single numbers at `place`, a vector of one element each, or a scalar without an axis."""
    return StoredName(tuple(f"{place}{name}" for name in (*vectors, *scalars)), n_scalars=len(scalars))


def whole_numbers(name: str) -> StoredName:
    """A vector of integers."""
    return StoredName((name,), whole_numbers=True)


def depthwise(name: str) -> StoredName:
    """A convolution of each channel alone, [C, W], stored [C, 1, W]."""
    return StoredName((name,), depthwise=True)


def stacked(*names: str) -> StoredName:
    """Several tensors, stacked by rows; with "{x}" in their names for each expert."""
    return StoredName(names)


def all_experts(name: str, *, transpose: bool = False, alternating: bool = False) -> StoredName:
    """One tensor [X, ..., ...] with the matrices, or [X, ...] with the biases, of all experts."""
    return StoredName((name,), transpose=transpose, by_expert=True, alternating=alternating)


def mxfp4_experts(name: str, *, alternating: bool = False) -> StoredName:
    """The matrices [out, in] of all experts in MXFP4: blocks [X, out, in / 32, 16], and scales."""
    names = (f"{name}_blocks", f"{name}_scales")
    return StoredName(names, by_expert=True, alternating=alternating, mxfp4=True)


def separate_heads(queries: str, keys: str, values: str) -> StoredName:
    """`qkv` as three tensors [N D, H], [K D, H] and [K D, H], or its bias as three vectors."""
    return StoredName((queries, keys, values), heads="separate")


def gated_heads(queries: str, keys: str, values: str) -> StoredName:
    """`qkv` with output gates: [2 N D, H] with each head's query and gate, [K D, H] and [K D, H]."""
    return StoredName((queries, keys, values), heads="gated")


def fused_heads(name: str) -> StoredName:
    """`qkv` [(N + 2 K) D, H], or its bias, as one tensor: all queries, all keys, all values."""
    return StoredName((name,), heads="fused")


def by_group(name: str) -> StoredName:
    """`qkv` [(N + 2 K) D, H], or its bias, as one tensor: for each K/V head its queries, key and value."""
    return StoredName((name,), heads="by_group")


def query_heads(name: str) -> StoredName:
    """`out`, stored [H, N D], the scale [N D] of a norm over all queries, or sinks [N]."""
    return StoredName((name,), heads="queries")


def key_heads(name: str) -> StoredName:
    """The scale [K D] of a norm over all keys."""
    return StoredName((name,), heads="keys")


def linear(
    name: str,
    stored: str,
    weight: Callable[[str], StoredName] = as_it_is,
    bias: Callable[[str], StoredName] = as_it_is,
) -> dict[str, StoredName]:
    """The weight and the bias of a linear layer, `name` to us and `stored` in the checkpoint."""
    return {f"{name}.weight": weight(f"{stored}.weight"), f"{name}.bias": bias(f"{stored}.bias")}


def projections(
    name: str, place: str, parts: Iterable[str], make: Callable[..., StoredName] = stacked
) -> dict[str, StoredName]:
    """The weight and the bias `name`, which the checkpoint has in parts (q_proj, k_proj) at `place`."""
    parts = tuple(parts)
    return {
        f"{name}.{leaf}": make(*(f"{place}{part}_proj.{leaf}" for part in parts))
        for leaf in ("weight", "bias")
    }


def layer_norm(name: str, stored: str) -> dict[str, StoredName]:
    """The scale and the bias of a LayerNorm, `name` to us and `stored` in the checkpoint."""
    return {f"{name}.scale": as_it_is(f"{stored}.weight"), f"{name}.bias": as_it_is(f"{stored}.bias")}
