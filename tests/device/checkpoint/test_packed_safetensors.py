"""Quantized safetensors: every format's tensors, written by hand, are the numbers that they mean."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.checkpoint.packed_safetensors import PackedMatrix, nibbles, planes, unpack_words
from orca_jax.checkpoint.safetensors_reader import read_header
from orca_jax.checkpoint.shard_reader import Box, Stored, read_box
from orca_jax.errors import TensorMismatch
from orca_jax.families.attention_config import Attention
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.packed_form import PackedForm, Scale
from orca_jax.families.parameters import Parameter
from orca_jax.families.quantization_config import Quantization, read_quantization
from orca_jax.families.stored_name import StoredName
from tests.device.checkpoint.tiny_checkpoint import Tensors, write_tensors
from tests.device.model.golden import DIRECTORY
from tests.packed_planes import literal_numbers
from tests.quantized_checkpoints import FORMATS, Format

GOLDEN = DIRECTORY / "compressed.npz"
COMPRESSED = (
    *("w4-group", "w4-channel", "w4-zeros", "w8-group", "w8-zeros", "int8-channel", "int8-tensor"),
    *("int8-zeros", "fp8-tensor", "fp8-channel", "fp8-block"),
)
SHAPE = (40, 128)
MODULE = "model.layers.0.self_attn.q_proj"


def quantization_of(form: Format) -> Quantization:
    fields = ConfigFields(Path("config.json"), {"quantization_config": form.section})
    found = read_quantization(fields)
    assert found is not None
    return found


def written(form: Format) -> tuple[Tensors, np.ndarray]:
    rng = np.random.default_rng(0)
    tensors, numbers = form.write(SHAPE, rng, rng)
    return {f"{MODULE}.{leaf}": tensor for leaf, tensor in tensors.items()}, numbers


def found(form: Format, tensors: Tensors, directory: Path, scales: Scale = "float32") -> PackedMatrix:
    how = quantization_of(form).of(MODULE)
    assert how is not None
    path = directory / "model.safetensors"
    write_tensors(path, tensors)
    return PackedMatrix.find(MODULE, how, SHAPE, read_header(path), scales)


def whole(stored: Stored) -> np.ndarray:
    values = read_box(stored, tuple((0, n) for n in stored.shape))
    assert values.dtype == stored.element
    return values


def planes_of(matrix: PackedMatrix) -> dict[str, np.ndarray]:
    """The whole planes of a weight that is this matrix."""
    assert isinstance(matrix.form, PackedForm)
    parameter = Parameter(("F", "H"), matrix.shape, "normal", "linear", form=matrix.form)
    found = planes([matrix], parameter, StoredName(("",)), Attention(n_heads=2, n_kv_heads=2, head_size=16))
    arrays = parameter.held_arrays(np.float32)
    assert found.keys() == arrays.keys()
    return {
        name: found[name].read(array.shape, array.dtype, tuple((0, n) for n in array.shape))
        for name, array in arrays.items()
    }


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=12), st.sampled_from([4, 8]))
def test_words_are_codes_from_the_lowest_bits_up(numbers: list[int], bits: int) -> None:
    expected = [(number >> bits * i) & ((1 << bits) - 1) for number in numbers for i in range(32 // bits)]
    one = np.array(numbers, np.int32)
    assert unpack_words(one[None], bits, 1)[0].tolist() == expected
    assert unpack_words(one[:, None], bits, 0)[:, 0].tolist() == expected


def test_a_word_of_awq_by_hand() -> None:
    word = np.array([[0x75316420]], np.uint32).view(np.int32)
    (codes,) = unpack_words(word, 4, 1, (0, 2, 4, 6, 1, 3, 5, 7))
    assert codes.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_the_order_of_nibbles() -> None:
    codes = (np.arange(64) % 32 // 2).astype(np.uint8)[None]
    expected = [(j + 16) // 2 << 4 | j // 2 for j in range(16)]
    assert nibbles(codes)[0].tolist() == expected * 2


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_and_its_planes_are_the_numbers_by_hand(tmp_path: Path, name: str) -> None:
    form = FORMATS[name]
    tensors, numbers = written(form)
    scales: Scale = "bfloat16" if form.section["quant_method"] == "compressed-tensors" else "float16"
    matrix = found(form, tensors, tmp_path, scales)
    np.testing.assert_array_equal(whole(matrix.dense()), numbers)
    of_planes = planes_of(matrix)
    if "order" in of_planes:
        numbers = numbers[:, of_planes["order"]]
    assert isinstance(matrix.form, PackedForm)
    np.testing.assert_array_equal(literal_numbers(matrix.form, of_planes), numbers)


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_matrix_as_compressed_tensors_unpacks_it(tmp_path: Path, name: str) -> None:
    """The file, with the package's own section, tensors and numbers, is of scripts/golden/compressed.py."""
    with np.load(GOLDEN) as file:
        group = json.loads(str(file[name]))
        arrays = {key.partition(".")[2]: file[key] for key in file.files if key.startswith(f"{name}.")}
    unpacked = arrays.pop("")
    if group["weights"]["type"] == "float":
        arrays["weight"] = arrays["weight"].view(ml_dtypes.float8_e4m3fn)
    section = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    form = Format(section, lambda shape, rng, order: (arrays, unpacked))
    how = quantization_of(form).of(MODULE)
    assert how is not None
    write_tensors(tmp_path / "one", {f"{MODULE}.{leaf}": array for leaf, array in arrays.items()})
    matrix = PackedMatrix.find(MODULE, how, unpacked.shape, read_header(tmp_path / "one"), "float32")
    np.testing.assert_array_equal(whole(matrix.dense()), unpacked)
    assert isinstance(matrix.form, PackedForm)
    np.testing.assert_array_equal(literal_numbers(matrix.form, planes_of(matrix)), unpacked)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_any_part_is_that_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    form = FORMATS[name]
    tensors, _ = written(form)
    matrix = found(form, tensors, tmp_path_factory.getbasetemp())
    held = matrix.form
    assert isinstance(held, PackedForm)
    names = ["codes", "scales", *(["zeros"] if matrix.how.zeros else [])]
    stored = {"": matrix.dense()} | {name: matrix.plane(name, held) for name in names}
    plane = data.draw(st.sampled_from(sorted(stored)))
    one = stored[plane]
    step = 16 if plane == "codes" and held.code == "nibbles" else 1
    box: Box = ()
    for axis, n in enumerate(one.shape):
        unit = step if axis else 1
        low = data.draw(st.integers(0, n // unit - 1))
        high = data.draw(st.integers(low + 1, n // unit))
        box = (*box, (low * unit, high * unit))
    expected = whole(one)[tuple(slice(*each) for each in box)]
    np.testing.assert_array_equal(read_box(one, box), expected)


@pytest.mark.parametrize(
    ("name", "leaf", "change", "words"),
    [
        ("w4a16", "weight_packed", lambda one: None, "weight_packed' is missing"),
        ("w4a16", "weight_packed", lambda one: one[:, 1:], "found I32"),
        ("w4a16", "weight_shape", lambda one: one + 1, "expected \\[40, 128\\], found \\[41, 129\\]"),
        ("w4a16", "weight_scale", lambda one: one.astype(np.float64), "found F64"),
        ("gptq", "scales", lambda one: one.T, "expected F16 or BF16 or F32 \\[4, 40\\]"),
        ("gptq", "qzeros", lambda one: one + 1, "expected zeros of 8, because the config"),
        ("gptq", "g_idx", lambda one: one[::-1].copy(), "another order, but the config says desc_act false"),
        ("gptq-order", "g_idx", lambda one: np.maximum(one, 1), "expected 32 inputs in each group"),
        ("w8a8", "weight", lambda one: one.astype(np.float16), "expected I8"),
        ("fp8-static", "input_scale", lambda one: None, "input_scale' is missing"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, name: str, leaf: str, change: Any, words: str) -> None:
    form = FORMATS[name]
    tensors, _ = written(form)
    changed = change(tensors.pop(f"{MODULE}.{leaf}"))
    if changed is not None:
        tensors[f"{MODULE}.{leaf}"] = changed
    with pytest.raises(TensorMismatch, match=words):
        planes_of(found(form, tensors, tmp_path))


def test_scales_that_the_planned_dtype_cannot_hold(tmp_path: Path) -> None:
    form = FORMATS["gptq"]
    tensors, _ = written(form)
    tensors[f"{MODULE}.scales"] = tensors[f"{MODULE}.scales"].astype(np.float32) + np.float32(1e-7)
    matrix = found(form, tensors, tmp_path, "float16")
    with pytest.raises(TensorMismatch, match="its scales are not numbers of float16"):
        planes_of(matrix)
