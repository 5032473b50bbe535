"""The forms in which a checkpoint stores one of our weights."""

from dataclasses import dataclass, replace
from typing import Literal

from orca_jax.families.attention_config import Attention
from orca_jax.families.parameters import Parameter
from orca_jax.families.trainers.array_form import ArrayForm

# How a checkpoint orders the heads of a weight; query head h uses K/V head h // G.
#   separate  three tensors: queries, keys, values
#   fused     one tensor: all queries, all keys, all values
#   by_group  one tensor: for each K/V head its queries, its key, its value
#   slices    one tensor in our order, for the checkpoint's own number of K/V heads
#   queries   one tensor with query heads alone
#   keys      one tensor with key heads alone
#   query_slices   one tensor with query heads alone, in our order
HeadOrder = Literal["separate", "fused", "by_group", "slices", "queries", "keys", "query_slices"]


@dataclass(frozen=True, slots=True)
class StoredName:
    """What a weight is called in a checkpoint.

    `names`: one tensor, or several that lie one above the other along the weight's first axis; "{i}" stands
    for the layer's number. `transpose`: each is stored [in, out]. `reshape`: it has more axes, of which
    neighbours are taken as one. `heads`: the weight has heads, in that order; without it they are as ours.
    `one_row`: a vector of ours, stored as a matrix of one row.
    "{x}" in all of `names` stands for an expert's number: there are these for each expert, one after another.
    `by_expert`: the tensors have an axis of experts before all others. Only these may be `alternating`: each
    gate's row is before its up's; or `mxfp4`: two tensors, of packed numbers and of the scales of every 32.
    `forms`: one for each of `names`, which says instead how it lies in an array of more axes.
    """

    names: tuple[str, ...]
    transpose: bool = False
    reshape: bool = False
    heads: HeadOrder | None = None
    forms: tuple[ArrayForm, ...] = ()
    one_row: bool = False
    by_expert: bool = False
    alternating: bool = False
    mxfp4: bool = False

    def in_layer(self, layer: str, prefix: str = "") -> "StoredName":
        """The names with the number of a layer for "{i}" and `prefix` for "{prefix}"."""
        names = tuple(name.replace("{i}", layer).replace("{prefix}", prefix) for name in self.names)
        return replace(self, names=names)

    def for_experts(self, number: int) -> "StoredName":
        """The names with each of `number` experts for "{x}"."""
        if not any("{x}" in name for name in self.names):
            return self
        every = (name.replace("{x}", str(x)) for x in range(number) for name in self.names)
        return replace(self, names=tuple(every))


@dataclass(frozen=True, slots=True)
class HeadPlace:
    """Where a checkpoint has one head of ours: in which of the tensors, as which head of that."""

    tensor: int
    head: int


def head_places(order: HeadOrder, attention: Attention) -> list[list[HeadPlace]]:
    """For each slice of the weight (parameters.py), and each of its K heads, where a checkpoint has it."""
    repeats, n_heads, n_kv_heads = attention.kv_repeats, attention.n_heads, attention.n_kv_heads
    stored = n_kv_heads // repeats  # K/V heads of the checkpoint
    group = n_heads // stored

    def place(slice_: int, k: int) -> HeadPlace:
        key = k // repeats
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
            case "separate":
                return HeadPlace(kind, key if kind else head)
            case "fused":
                return HeadPlace(0, n_heads + (kind - 1) * stored + key if kind else head)
            case "by_group":
                at = group + kind - 1 if kind else head % group
                return HeadPlace(0, (key if kind else head // group) * (group + 2) + at)

    n_queries = {"queries": attention.group, "query_slices": attention.group, "keys": 1}
    n_slices = n_queries.get(order, attention.group + 2)
    return [[place(slice_, k) for k in range(n_kv_heads)] for slice_ in range(n_slices)]


def heads_of_tensors(order: HeadOrder, attention: Attention) -> tuple[int, ...]:
    """The number of heads in each of the checkpoint's tensors."""
    n_heads, stored = attention.n_heads, attention.n_kv_heads // attention.kv_repeats
    match order:
        case "separate":
            return n_heads, stored, stored
        case "fused" | "by_group" | "slices":
            return (n_heads + 2 * stored,)
        case "queries" | "query_slices":
            return (n_heads,)
        case "keys":
            return (stored,)


def own_order(parameter: Parameter, attention: Attention) -> HeadOrder | None:
    """The order in which we keep a parameter's heads; None where it has none, or is in any order the same."""
    if attention.group == 1 or attention.latent is not None:
        return None
    if parameter.axes[0] == "G+2":
        return "slices"
    if parameter.takes_attention or parameter.axes in (("G", "KD"), ("G", "K")):
        return "query_slices"
    return "keys" if parameter.axes == ("KD",) else None


def size_of_heads(parameter: Parameter, attention: Attention) -> int:
    """How many elements of a parameter belong to each head; a sink is one number."""
    return attention.head_size if any("D" in axis for axis in parameter.axes) else 1


def as_it_is(name: str) -> StoredName:
    """One tensor of our shape."""
    return StoredName((name,))


def transposed(name: str) -> StoredName:
    """One matrix, stored [in, out]."""
    return StoredName((name,), transpose=True)


def one_row(name: str) -> StoredName:
    """A vector, stored as a matrix [1, n]."""
    return StoredName((name,), one_row=True)


def stacked(*names: str) -> StoredName:
    """Several tensors, each some rows of ours."""
    return StoredName(names)


def each_expert(*names: str) -> StoredName:
    """For each expert, "{x}" in the names, several tensors, each some rows of ours."""
    return StoredName(names)


def all_experts(name: str, *, transpose: bool = False, alternating: bool = False) -> StoredName:
    """One tensor [X, ..., ...] with the matrices, or [X, ...] with the biases, of all experts."""
    return StoredName((name,), transpose=transpose, by_expert=True, alternating=alternating)


def mxfp4_experts(name: str, *, alternating: bool = False) -> StoredName:
    """The matrices of all experts in four bits, [out, in] each: blocks [X, out, in / 32, 16], and scales."""
    names = (f"{name}_blocks", f"{name}_scales")
    return StoredName(names, by_expert=True, alternating=alternating, mxfp4=True)


def separate_heads(queries: str, keys: str, values: str) -> StoredName:
    """`qkv` as three tensors [N D, H], [K D, H] and [K D, H], or as biases of those rows."""
    return StoredName((queries, keys, values), heads="separate")


def fused_heads(name: str, order: HeadOrder = "fused") -> StoredName:
    """`qkv` as one tensor [(N + 2 K) D, H], or as a bias of those rows."""
    return StoredName((name,), heads=order)


def query_heads(name: str) -> StoredName:
    """`out`, stored [H, N D], the scale [N D] of a norm over all queries, or sinks [N]."""
    return StoredName((name,), heads="queries")


def key_heads(name: str) -> StoredName:
    """The scale [K D] of a norm over all keys."""
    return StoredName((name,), heads="keys")
