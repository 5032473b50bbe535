"""Heads in every order of a checkpoint are read into the engine's order and written back."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.checkpoint.head_view import HeadView, slices_of_tensor, stored_shapes, written_tensor
from orca_jax.checkpoint.shard_reader import Box, Parts
from orca_jax.families.attention_config import Attention
from orca_jax.families.parameters import Parameter
from orca_jax.families.stored_name import HeadOrder, StoredName, head_places, heads_of_tensors

H = 5


@dataclass
class InMemory:
    values: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def element(self) -> np.dtype:
        return self.values.dtype

    divisible = True

    def pieces(self, box: Box) -> Iterator[tuple[int, np.ndarray]]:
        part = self.values[tuple(slice(*edges) for edges in box)]
        for row in range(0, len(part), 3):
            yield row, part[row : row + 3]


def parameter(kind: str, own: Attention) -> Parameter:
    group, width = own.group, own.kv_width
    if kind == "out":
        heads, sizes = (("KD",), (width,)) if group == 1 else (("G", "KD"), (group, width))
        return Parameter(("H", *heads), (H, *sizes), "normal", "linear")
    shape = (group + 2, width, H)[: 2 if kind == "bias" else 3]
    return Parameter(
        ("G+2", "KD", "H")[: len(shape)], shape, "normal", "bias" if kind == "bias" else "linear"
    )


def stored_tensors(order: HeadOrder, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
    """q [N, D, ...], k and v [K, D, ...] in an order, heads and their elements as one axis."""
    n_heads, n_kv = len(q), len(k)
    by_group = q.reshape(n_kv, n_heads // n_kv, *q.shape[1:])
    whole = {
        "separate": [q, k, v],
        "fused": [np.concatenate([q, k, v])],
        "by_group": [np.concatenate([by_group, k[:, None], v[:, None]], axis=1)],
        "slices": [np.concatenate([by_group.swapaxes(0, 1), k[None], v[None]])],
        "queries": [q],
        "query_slices": [by_group.swapaxes(0, 1)],
    }[order]
    return [tensor.reshape(-1, *q.shape[2:]) for tensor in whole]


@st.composite
def attentions(draw: st.DrawFn) -> Attention:
    """Attention configurations whose K/V heads are stored once or repeated."""
    stored, group = draw(st.sampled_from([(1, 1), (3, 1), (1, 4), (2, 4), (3, 6), (2, 3)]))
    repeats = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if group % n == 0]))
    return Attention(
        n_heads=stored * group,
        n_kv_heads=stored * repeats,
        head_size=draw(st.sampled_from([1, 4])),
        kv_repeats=repeats,
    )


@settings(max_examples=300)
@given(
    own=attentions(),
    kind=st.sampled_from(["weight", "bias", "out"]),
    transpose=st.booleans(),
    data=st.data(),
)
def test_any_box_of_any_order(own: Attention, kind: str, transpose: bool, data: st.DataObject) -> None:
    orders: tuple[HeadOrder, ...] = (
        ("queries", "query_slices") if kind == "out" else ("separate", "fused", "by_group", "slices")
    )
    order = data.draw(st.sampled_from(orders))
    transpose = transpose and kind != "bias"
    rng = np.random.default_rng(0)
    inner = () if kind == "bias" else (H,)
    stored_kv = own.n_kv_heads // own.kv_repeats
    q, k, v = (
        rng.standard_normal((n, own.head_size, *inner)).astype("f4")
        for n in (own.n_heads, stored_kv, stored_kv)
    )
    # Ours, by the definition: slice g, position k is query head k G + g; keys and values repeated.
    by_group = q.reshape(own.n_kv_heads, own.group, *q.shape[1:]).swapaxes(0, 1)
    again = [each.repeat(own.kv_repeats, axis=0)[None] for each in (k, v)]
    slices = by_group if kind == "out" else np.concatenate([by_group, *again])
    expected = slices.reshape(len(slices), own.kv_width, *inner)
    entry = parameter(kind, own)
    if kind == "out":
        expected = np.moveaxis(expected, 2, 0).reshape(entry.shape)

    wanted = StoredName(tuple("abc"[: 3 if order == "separate" else 1]), transpose, heads=order)
    tensors = stored_tensors(order, q, k, v)
    as_columns = (kind == "out") != transpose
    held = [tensor.T if as_columns and inner else tensor for tensor in tensors]
    assert [tensor.shape for tensor in held] == stored_shapes(entry, wanted, own)
    view = HeadView.of([InMemory(tensor) for tensor in held], entry, wanted, own)
    edges = [sorted(data.draw(st.sets(st.integers(0, n), min_size=2, max_size=2))) for n in entry.shape]
    box = tuple((first, end) for first, end in edges)
    part = Parts((view,)).read(entry.shape, np.dtype("f4"), box)
    np.testing.assert_array_equal(part, expected[tuple(slice(*edge) for edge in box)])

    if own.kv_repeats == 1 and kind != "out":
        places = head_places(order, own)
        for i, (tensor, n_heads) in enumerate(zip(tensors, heads_of_tensors(order, own), strict=True)):
            first, end = slices_of_tensor(places, i)
            np.testing.assert_array_equal(
                written_tensor(expected[first:end], first, places, i, n_heads), tensor
            )
