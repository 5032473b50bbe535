"""Arrays move between any two meshes in pieces: the same bits, and never more than two pieces beside them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from orca_jax.sharding import pieces
from orca_jax.sharding.pieces import moved


def place(devices: Sequence[int], mesh: tuple[int, ...], *spec: Any) -> NamedSharding:
    """A sharding over devices by their numbers, with the axes a and b."""
    array = np.array(jax.devices())[list(devices)].reshape(mesh)
    return NamedSharding(Mesh(array, ("a", "b")[: len(mesh)]), PartitionSpec(*spec))


FSDP = place(range(8), (8,), "a")
PLACES = [
    FSDP,
    place(range(8), (4, 2), None, "b"),  # a data-parallel mesh of 4, tensor-parallel over 2
    place([6, 7], (2,), None, "a"),  # one stage of four, tensor-parallel over 2
    place([3, 1, 5, 7], (4,), "a"),
    place(range(7, -1, -1), (8,), "a"),
    place(range(8), (2, 4), "a", "b"),
    place(range(8), (2, 4), ("b", "a")),
    place(range(4), (4,)),
    SingleDeviceSharding(jax.devices()[5]),
]


def buffers() -> dict[int, int]:
    """The bytes of all live buffers by their addresses."""
    return {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for array in jax.live_arrays()
        if not array.is_deleted()
        for shard in array.addressable_shards
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", [1, 2, 3, 5, 8], ids=lambda i: f"to {i}")
def test_at_most_two_pieces_beside_the_result(
    monkeypatch: pytest.MonkeyPatch, target: int, dtype: str
) -> None:
    """From a trainer's FSDP over 8 devices."""
    values = np.random.default_rng(0).standard_normal((512, 96)).astype(np.float32)
    given = jax.device_put(values, FSDP)
    piece_bytes, before, seen = 4096, buffers(), list[dict[int, int]]()
    paste, cut = pieces._pasted, pieces._cut

    def watched(*arguments: Any, inner: Any) -> Any:
        out = inner(*arguments)
        seen.append({at: n for at, n in buffers().items() if at not in before})
        return out

    monkeypatch.setattr(pieces, "_cut", lambda *arguments: watched(*arguments, inner=cut))
    monkeypatch.setattr(pieces, "_pasted", lambda *arguments: watched(*arguments, inner=paste))
    there = PLACES[target]
    made = moved(given, there, dtype, piece_bytes=piece_bytes)
    np.testing.assert_array_equal(np.asarray(made), values.astype(jnp.dtype(dtype)))
    assert made.sharding == there and made.dtype == dtype
    assert len(seen) > 16
    shard_bytes = made.addressable_shards[0].data.nbytes
    result = {shard.data.unsafe_buffer_pointer(): shard_bytes for shard in made.addressable_shards}
    for live in seen:
        extra = [n for at, n in live.items() if at not in result]
        assert sum(extra) <= 2 * piece_bytes, extra
        assert not extra or max(extra) <= piece_bytes


@given(
    shape=st.tuples(st.sampled_from([8, 24]), st.sampled_from([8, 40])),
    places=st.tuples(st.sampled_from(PLACES), st.sampled_from(PLACES)),
    piece_bytes=st.sampled_from([1, 100, 1 << 20]),
    pad=st.sampled_from([0, 8]),
)
@example((24, 8), (PLACES[5], PLACES[3]), 100, 8)
@settings(max_examples=8, deadline=None)
def test_the_same_bits_between_any_places(
    shape: tuple[int, int], places: tuple[Any, Any], piece_bytes: int, pad: int
) -> None:
    """Also into an array with further rows, which are zeros."""
    bits = np.random.default_rng(1).integers(0, 2**16, shape).astype(np.uint16)
    bits[bits & 0x7FFF > 0x7F80] = 1  # programs of a CPU make every NaN a quiet one
    values = bits.view(ml_dtypes.bfloat16)
    larger = (shape[0] + pad, shape[1])
    for given_values in (values, jax.device_put(values, places[0])):
        made = moved(given_values, places[1], values.dtype, shape=larger, piece_bytes=piece_bytes)
        found = np.asarray(made)
        assert made.sharding == places[1]
        np.testing.assert_array_equal(found[: shape[0]].view(np.uint16), values.view(np.uint16))
        assert not found[shape[0] :].astype(np.float32).any()


def test_the_result_shares_no_memory() -> None:
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    for there in (SingleDeviceSharding(jax.devices()[0]), PLACES[7], FSDP):
        given = jax.device_put(values, there)
        made = moved(given, there, np.float32)
        given.delete()
        ours = values.copy()
        from_host = moved(ours, there, np.float32)
        ours[:] = 0
        np.testing.assert_array_equal(np.asarray(made), values)
        np.testing.assert_array_equal(np.asarray(from_host), values)


def test_numbers_without_axes() -> None:
    for value in (np.array(3, np.float32), jnp.float32(3)):
        assert moved(value, PLACES[7], np.float32) == 3
        assert moved(value, PLACES[7], ml_dtypes.bfloat16, piece_bytes=1) == 3


@pytest.mark.parametrize("n_bytes", [1, 7, 8, 31, 32, 64, 95, 96, 1000])
def test_pieces_cover_a_box_once(n_bytes: int) -> None:
    counts = np.zeros((5, 6, 7), int)
    for piece in pieces.pieces(((1, 4), (2, 4), (0, 7)), 4, n_bytes):
        part = counts[tuple(slice(*each) for each in piece)]
        assert 4 * part.size <= max(n_bytes, 4)
        part += 1
    expected = np.zeros((5, 6, 7), int)
    expected[1:4, 2:4] = 1
    np.testing.assert_array_equal(counts, expected)
