"""DeepSeek checkpoints: FP8 in blocks, layers that predict further tokens, and values kept in float32."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.convert import convert_checkpoint
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.checkpoint.packed_safetensors import PackedMatrix
from orca_jax.checkpoint.safetensors_reader import read_header
from orca_jax.checkpoint.shard_reader import Stored, read_box
from orca_jax.errors import BadModelConfig, TensorMismatch, UnsupportedModel
from orca_jax.families.quantization_config import StoredMatrix
from orca_jax.model.packed_weight import unpacked as unpacked_planes
from orca_jax.model.weight import PackedWeight
from orca_jax.sharding.device_group import DeviceGroup
from orca_jax.sharding.partition import StagePart
from tests.device.checkpoint.tiny_checkpoint import Tensors, write_checkpoint, write_tensors
from tests.device.model.golden import DIRECTORY

NAME = "deepseek-v3-groups-yarn-dense-first"
INDEXED = "deepseek-v32-groups-yarn"
FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL_FLOAT = np.dtype(ml_dtypes.float8_e4m3fn)
# As published, every matrix of layers but the routers, and the weights of index queries.
PACKED = re.compile(r"model\.layers\..*(?<!weights)(_proj|_with_mqa|indexer\.wq_b|indexer\.wk)\.weight")


def config_of(name: str) -> dict[str, Any]:
    return json.loads((DIRECTORY / name / "config.json").read_text())


def stored(name: str) -> Tensors:
    return load_file(DIRECTORY / name / "model.safetensors")


def numbers_of(weight: Any, dtype: Any) -> jax.Array:
    """The numbers of a weight, unpacked if it is packed."""
    return unpacked_planes(weight.form, weight.arrays, dtype) if isinstance(weight, PackedWeight) else weight


def with_scales(tensors: Tensors) -> Tensors:
    """Matrices in FP8, each with the same scale in all its blocks."""
    packed = dict(tensors)
    for name, value in tensors.items():
        if PACKED.fullmatch(name):
            scale = np.float32(np.abs(value).max() / 448)
            packed[name] = (value / scale).astype(SMALL_FLOAT)
            blocks = [-(-size // 128) for size in value.shape]
            packed[f"{name}_scale_inv"] = np.full(blocks, scale, np.float32)
    return packed


def unpacked(tensors: Tensors) -> Tensors:
    """Dequantised tensors, in float32."""
    plain = {name: value for name, value in tensors.items() if not name.endswith("_scale_inv")}
    for name, value in plain.items():
        if value.dtype == SMALL_FLOAT:
            plain[name] = value.astype(np.float32) * tensors[f"{name}_scale_inv"][0, 0]
    return plain


def block_scaled(directory: Path, values: np.ndarray, scales: np.ndarray) -> Stored:
    """The numbers of a matrix with a scale for each block."""
    how = StoredMatrix(layout="fp8", bits=8, group=128, rows=128, scale_names=("weight_scale_inv",))
    path = directory / "matrix"
    write_tensors(path, {"one.weight": values, "one.weight_scale_inv": scales})
    return PackedMatrix.find("one", how, values.shape, read_header(path), "float32").dense()


def test_numbers_of_eight_bits_worked_by_hand(tmp_path: Path) -> None:
    """1.5, -448 (the largest), 2 ** -9 (the smallest) and 0.4375, in four blocks, three of them partial."""
    values = np.zeros((130, 131), np.uint8)
    values[0, 0], values[127, 127], values[0, 128], values[128, 5], values[129, 130] = (
        0x3C,
        0xFE,
        1,
        0x2E,
        0xBC,
    )
    scales = np.array([[2.0, 0.5], [10.0, -3.0]], np.float32)
    found = read_box(block_scaled(tmp_path, values.view(SMALL_FLOAT), scales), ((0, 130), (0, 131)))
    expected = np.zeros((130, 131), np.float32)
    expected[0, 0], expected[127, 127], expected[0, 128] = 3.0, -896.0, 2**-10
    expected[128, 5], expected[129, 130] = 4.375, 4.5
    np.testing.assert_array_equal(found, expected)


def test_a_matrix_as_transformers_unpacks_it(tmp_path: Path) -> None:
    with np.load(DIRECTORY / "fp8.npz") as truth:
        matrix = block_scaled(tmp_path, truth["values"].view(SMALL_FLOAT), truth["scales"])
        whole = read_box(matrix, ((0, 256), (0, 384)))
        np.testing.assert_array_equal(whole.ravel()[truth["places"]], truth["unpacked"])
        assert len({*truth["unpacked"].tolist()}) > 1000


@pytest.mark.parametrize(
    ("name", "dtype"), [(NAME, jnp.float32), (NAME, jnp.bfloat16), (INDEXED, jnp.float32)]
)
def test_packed_weights_are_the_unpacked_ones(tmp_path: Path, name: str, dtype: Any) -> None:
    packed = with_scales(stored(name))
    config = config_of(name)
    given_ = load_checkpoint(
        write_checkpoint(tmp_path / "packed", config | {"quantization_config": FP8}, packed), dtype=dtype
    )
    expected = load_checkpoint(write_checkpoint(tmp_path / "plain", config, unpacked(packed)), dtype=dtype)
    assert sum(value.dtype == SMALL_FLOAT for value in packed.values()) > 20
    assert given_.config.with_forms({}) == expected.config
    n_packed = 0
    for weight, value in expected.parameters.items():
        found = given_.parameters[weight]
        n_packed += isinstance(found, PackedWeight)
        np.testing.assert_array_equal(numbers_of(found, dtype).reshape(value.shape), value, err_msg=weight)
    assert n_packed > 10


@pytest.mark.parametrize("n_devices", [2, 4])
def test_each_device_unpacks_its_part(tmp_path: Path, n_devices: int) -> None:
    directory = write_checkpoint(
        tmp_path, config_of(NAME) | {"quantization_config": FP8}, with_scales(stored(NAME))
    )
    whole = load_checkpoint(directory, dtype=jnp.float32)
    config = whole.config.for_devices(n_devices)
    group = DeviceGroup(tuple(jax.devices()[:n_devices]))
    part = StagePart(range(config.n_layers), group, first=True, last=True)
    cut = re.compile(r"layers\.\d\.(q_a|q_b|kv_a|kv_b|out|experts\.up|experts\.down)\.weight")
    only = {name: place for name, place in part.placement(config).items() if cut.fullmatch(name)}
    (given_,) = load_checkpoint(directory, dtype=jnp.float32, placements=[only], kv_repeats=n_devices).stages
    heads = given_["layers.0.kv_b.weight"]
    assert {shard.data.shape for shard in heads.addressable_shards} == {(4 * 16 // n_devices, 16)}
    for name, value in given_.items():
        jax.tree.map(np.testing.assert_array_equal, value, whole.parameters[name])


@pytest.mark.parametrize("name", [NAME, "deepseek-v2-biases-tied"])
def test_there_and_back(tmp_path: Path, name: str) -> None:
    assert convert_checkpoint(DIRECTORY / name, tmp_path / "orbax") == "orbax"
    assert convert_checkpoint(tmp_path / "orbax", tmp_path / "back") == "safetensors"
    original, back = stored(name), load_file(tmp_path / "back" / "model.safetensors")
    assert set(back) == set(original)
    assert all(np.array_equal(back[key], original[key]) for key in original)


def test_one_tensor_for_all_experts(tmp_path: Path) -> None:
    """transformers 5 saves it so with save_original_format=False; in FP8 it is refused."""
    tensors = stored(NAME)
    own = {name: value for name, value in tensors.items() if ".mlp.experts." not in name}
    parts = {
        part: np.stack([tensors[f"model.layers.1.mlp.experts.{i}.{part}_proj.weight"] for i in range(12)])
        for part in ("gate", "up", "down")
    }
    own["model.layers.1.mlp.experts.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
    own["model.layers.1.mlp.experts.down_proj"] = parts["down"]
    found = load_checkpoint(write_checkpoint(tmp_path / "plain", config_of(NAME), own), dtype=jnp.float32)
    for name, value in load_checkpoint(DIRECTORY / NAME, dtype=jnp.float32).parameters.items():
        np.testing.assert_array_equal(found.parameters[name], value, err_msg=name)
    own["model.layers.1.mlp.experts.down_proj"] = parts["down"].astype(SMALL_FLOAT)
    with pytest.raises(TensorMismatch, match="found F8_E4M3; quantized weights are not supported"):
        load_checkpoint(write_checkpoint(tmp_path / "packed", config_of(NAME), own), dtype=jnp.float32)


def test_a_packed_checkpoint_is_written_unpacked(tmp_path: Path) -> None:
    packed = with_scales(stored(NAME))
    directory = write_checkpoint(tmp_path / "packed", config_of(NAME) | {"quantization_config": FP8}, packed)
    assert (
        convert_checkpoint(directory, tmp_path / "out", to="safetensors", dtype="bfloat16") == "safetensors"
    )
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    written = load_file(tmp_path / "out" / "model.safetensors")
    expected = unpacked(packed)
    assert written.keys() == expected.keys()
    for name, value in expected.items():
        correction = name.endswith("e_score_correction_bias")
        assert written[name].dtype == (np.float32 if correction else ml_dtypes.bfloat16), name
        np.testing.assert_array_equal(written[name], value.astype(written[name].dtype), err_msg=name)


def test_scales_that_are_missing_or_of_another_form(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    scales = f"{name}_scale_inv"
    packed = with_scales(stored(NAME))
    config = config_of(NAME) | {"quantization_config": FP8}
    without = {key: value for key, value in packed.items() if key != scales}
    wrong = [
        (without, "found none"),
        (packed | {scales: packed[scales][0]}, r"found F32 \[1\]"),
        (packed | {scales: packed[scales].astype(np.float64)}, "found F64"),
        (packed | {name: stored(NAME)[name]}, "expected no such tensor"),
    ]
    for i, (tensors, message) in enumerate(wrong):
        directory = write_checkpoint(tmp_path / str(i), config, tensors)
        with pytest.raises(TensorMismatch, match=message):
            load_checkpoint(directory, dtype=jnp.float32)
    mixtral = "mixtral-grouped"
    tensors = stored(mixtral)
    key = next(key for key in tensors if "w1" in key)
    tensors |= {key: tensors[key].astype(SMALL_FLOAT), f"{key}_scale_inv": np.ones((1, 1), np.float32)}
    directory = write_checkpoint(tmp_path / mixtral, config_of(mixtral), tensors)
    with pytest.raises(TensorMismatch, match="quantized weights are not supported"):
        load_checkpoint(directory, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "hqq"}, "its weights are quantised by HQQ (quant_method hqq)"),
        ({"weight_block_size": [128]}, "weight_block_size: expected two whole numbers"),
        ({"activation_scheme": "static"}, "expected dynamic, with weight_block_size, found static"),
        ({"fmt": "e5m2"}, "fmt: expected one of e4m3, float8_e4m3fn, found 'e5m2'"),
        ({"odd": 3}, "odd is 3"),
    ],
)
def test_another_quantization_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    config = config_of(NAME) | {"quantization_config": FP8 | changes}
    with pytest.raises(UnsupportedModel, match=re.escape(words)):
        load_checkpoint(write_checkpoint(tmp_path, config, stored(NAME)), dtype=jnp.float32)


def test_a_layer_that_predicts_further_tokens_is_not_read(tmp_path: Path) -> None:
    tensors = stored(NAME)
    n = config_of(NAME)["num_hidden_layers"]
    further = {
        key.replace(f"layers.{n - 1}.", f"layers.{n}."): value
        for key, value in tensors.items()
        if f"layers.{n - 1}." in key
    }
    marks = {
        f"model.layers.{n}.{name}.weight": np.ones(3, "f4") for name in ("enorm", "hnorm", "shared_head.norm")
    }
    config = config_of(NAME) | {"num_nextn_predict_layers": 1}
    eh_proj = {f"model.layers.{n}.eh_proj.weight": np.ones((3, 6), "f4")}
    directory = write_checkpoint(tmp_path / "with", config, tensors | further | marks | eh_proj)
    found = load_checkpoint(directory, dtype=jnp.float32)
    expected = load_checkpoint(DIRECTORY / NAME, dtype=jnp.float32)
    assert found.config == expected.config and found.parameters.keys() == expected.parameters.keys()
    # In a layer of the model the same name is one too many.
    within = {"model.layers.0.eh_proj.weight": np.ones((3, 6), "f4")}
    with pytest.raises(TensorMismatch, match=r"layers\.0\.eh_proj"):
        load_checkpoint(write_checkpoint(tmp_path / "within", config, tensors | within), dtype=jnp.float32)
    # One layer more that is like the others is none of these.
    directory = write_checkpoint(tmp_path / "without", config, tensors | further)
    with pytest.raises(BadModelConfig, match=f"belongs to layer {n}"):
        load_checkpoint(directory, dtype=jnp.float32)


def test_the_correction_of_the_choice_stays_float32() -> None:
    """This holds for a model of any dtype, for every way to load it, and in an engine's programs."""
    name = "layers.1.router.correction"
    expected = stored(NAME)["model.layers.1.mlp.gate.e_score_correction_bias"]
    loaded = load_checkpoint(DIRECTORY / NAME, dtype=jnp.bfloat16).parameters
    assert {key: value.dtype for key, value in loaded.items() if value.dtype != jnp.bfloat16} == {
        name: "float32"
    }
    np.testing.assert_array_equal(loaded[name], expected)
    assert not np.array_equal(expected, expected.astype(ml_dtypes.bfloat16))
    with LLM(DIRECTORY / NAME, dtype="bfloat16", max_batch_size=2, max_batch_tokens=64) as llm:
        before = llm.generate([[1, 2, 3]], GREEDY)[0].token_ids
        llm.update_weights(DIRECTORY / NAME)
        assert llm.generate([[1, 2, 3]], GREEDY)[0].token_ids == before
        llm.update_weights({key: jnp.asarray(value) for key, value in loaded.items()})
        assert llm.generate([[1, 2, 3]], GREEDY)[0].token_ids == before
        llm.sleep()
        llm.wake_up()
        assert llm.generate([[1, 2, 3]], GREEDY)[0].token_ids == before
