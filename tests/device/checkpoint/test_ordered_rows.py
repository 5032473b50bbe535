"""Rows of recurrent layers are read in the order of devices, whatever a checkpoint's planes are."""

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.checkpoint.ordered_rows import OrderedRows, in_order_of_shares
from orca_jax.checkpoint.shard_reader import Box
from orca_jax.config import ParallelConfig
from orca_jax.families.hf_config import read_config
from orca_jax.families.packed_form import w8
from orca_jax.families.parameters import packable_weights, parameter_table
from orca_jax.sharding.partition import split_model
from tests.device.model.golden import DIRECTORY

ROWS = (0, 1, 4, 5, 2, 3, 4, 5)  # as of two devices that both have rows 4 and 5


@dataclass
class Counting:
    """An array that counts the elements that are read."""

    values: np.ndarray
    divisible: bool
    n_read: int = 0

    def n_bytes(self, shape: tuple[int, ...], box: Box) -> int:
        return self.values[tuple(slice(*each) for each in box)].nbytes

    def read(self, shape: tuple[int, ...], dtype: np.dtype, box: Box) -> np.ndarray:
        assert shape == self.values.shape
        found = self.values[tuple(slice(*each) for each in box)].astype(dtype)
        self.n_read += found.size
        return found


@pytest.mark.parametrize("divisible", [True, False])
@pytest.mark.parametrize("first", range(8))
def test_every_box_has_its_rows(divisible: bool, first: int) -> None:
    values = np.arange(18, dtype=np.float32).reshape(6, 3)
    expected = np.array([[0, 1, 2], [3, 4, 5], [12, 13, 14], [15, 16, 17], [6, 7, 8], [9, 10, 11]])
    expected = np.concatenate([expected, [[12, 13, 14], [15, 16, 17]]])
    for end in range(first + 1, 9):
        plane = Counting(values, divisible)
        ordered = OrderedRows(plane, ROWS, 6)
        box = ((first, end), (1, 3))
        np.testing.assert_array_equal(
            ordered.read((8, 3), np.dtype(np.float64), box), expected[first:end, 1:3]
        )
        assert plane.n_read == (2 * (end - first) if divisible else 2 * 6)
        assert ordered.n_bytes((8, 3), box) == 4 * 2 * (end - first)


def test_only_planes_with_rows_are_reordered() -> None:
    """GPTQ's order of inputs is the same for all rows."""
    stored = read_config(DIRECTORY / "qwen3-5-grouped")
    name = "layers.0.delta_in.weight"
    assert name in packable_weights(stored)
    stored = stored.with_forms({name: replace(w8(None), ordered=True)})
    model = stored.with_state_shares(2)
    arrays = parameter_table(stored)[name].held_arrays(np.float32)
    planes = {key: Counting(np.zeros(array.shape), True) for key, array in arrays.items()}
    found = in_order_of_shares({name: planes, "final_norm.scale": planes["codes"]}, stored, model)
    assert found["final_norm.scale"] is planes["codes"]
    source = found[name]
    assert isinstance(source, dict) and set(source) == {"codes", "scales", "order"}
    assert source["order"] is planes["order"]
    assert isinstance(source["codes"], OrderedRows) and isinstance(source["scales"], OrderedRows)


def test_packed_weights_on_two_devices_are_those_of_one() -> None:
    """Dense numbers are packed after their rows are reordered: each row keeps its codes and its scale."""
    directory = DIRECTORY / "qwen3-5-grouped"
    stored = read_config(directory)
    forms = {name: w8(None, scale="float32") for name in packable_weights(stored) if ".delta_" in name}
    alone = load_checkpoint(directory, dtype="float32", forms=forms).parameters
    model = stored.with_forms(forms).for_devices(2)
    (part,) = split_model(model, jax.devices(), ParallelConfig(tensor_parallel=2))
    assert model.attention.kv_repeats == 1
    (both,) = load_checkpoint(
        directory,
        dtype="float32",
        forms=forms,
        vocab_multiple=model.vocab_multiple,
        state_shares=2,
        placements=[part.placement(model)],
    ).stages
    # 2 key heads of 8, 4 value heads of 6: queries 0 to 15, keys 16 to 31, values 32 to 55.
    rows = [*range(8), *range(16, 24), *range(32, 44), *range(8, 16), *range(24, 32), *range(44, 56)]
    for name in forms:
        for key, array in both[name].arrays.items():
            whole = np.asarray(alone[name].arrays[key])
            expected = whole[rows] if name.endswith("delta_in.weight") else whole
            np.testing.assert_array_equal(array, expected, f"{name} {key}")
