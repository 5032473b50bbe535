"""Orbax checkpoints: as Orbax itself writes them, with a name map or without, and every way to be wrong."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from orca_jax.checkpoint.directory import model_config
from orca_jax.checkpoint.locate import load_checkpoint
from orca_jax.errors import BadModelConfig, CheckpointError, CorruptFile, NotACheckpoint, TensorMismatch
from orca_jax.families.model_config import ModelConfig
from orca_jax.model.gpt import init_parameters, parameter_shapes

MODEL: dict[str, Any] = {
    "vocab_size": 11,
    "n_positions": 6,
    "hidden_size": 64,
    "n_layers": 2,
    "n_heads": 2,
    "ffn_size": 80,
    "eos_token_ids": [10],
}
CONFIG = ModelConfig(**{**MODEL, "eos_token_ids": (10,)})
Tree = dict[str, Any]


@pytest.fixture(scope="module")
def parameters() -> dict[str, jax.Array]:
    return init_parameters(CONFIG, jax.random.key(0), jnp.dtype(jnp.float32))


@pytest.fixture(scope="module")
def saved(parameters: dict[str, jax.Array], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "model"
    save(directory, parameters)
    describe(directory)
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


def save(directory: Path, tree: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory, tree)


def describe(directory: Path, **more: Any) -> None:
    (directory / "orca.json").write_text(json.dumps({"model": MODEL, **more}))


def assert_equal(found: dict[str, jax.Array], expected: dict[str, jax.Array], dtype: Any = "f4") -> None:
    assert list(found) == list(parameter_shapes(CONFIG))
    for name, value in found.items():
        assert value.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(np.asarray(value), np.asarray(expected[name].astype(dtype)), name)


def fails(error: type[CheckpointError], directory: Path, *words: str) -> None:
    with pytest.raises(error) as raised:
        load_checkpoint(directory, dtype=np.float32)
    assert type(raised.value) is error
    message = str(raised.value)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    assert message.isprintable() and len(message) < 1500


# --- what is right


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_a_checkpoint_with_our_names(saved: Path, parameters: dict[str, jax.Array], dtype: Any) -> None:
    loaded = load_checkpoint(saved, dtype=dtype)
    assert loaded.config == CONFIG == model_config(saved)
    assert_equal(loaded.parameters, parameters, dtype)


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_other_stored_dtypes(tmp_path: Path, parameters: dict[str, jax.Array], stored: str) -> None:
    low = {name: value.astype(stored) for name, value in parameters.items()}
    save(tmp_path / "model", low)
    describe(tmp_path / "model")
    assert_equal(load_checkpoint(tmp_path / "model", dtype=np.float32).parameters, low)


@pytest.mark.parametrize(("ocdbt", "zarr3"), [(True, True), (False, False), (False, True)])
def test_other_layouts_of_orbax(
    tmp_path: Path, parameters: dict[str, jax.Array], ocdbt: bool, zarr3: bool
) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "model", args=ocp.args.PyTreeSave(parameters))
    describe(tmp_path / "model")
    assert_equal(load_checkpoint(tmp_path / "model", dtype=np.float32).parameters, parameters)


def test_a_step_of_a_manager_among_other_state(tmp_path: Path, parameters: dict[str, jax.Array]) -> None:
    nested: Tree = {"embed": parameters["token_embedding"], "rest": dict(parameters), "step": 7, "none": None}
    del nested["rest"]["token_embedding"]
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(7, args=ocp.args.Composite(state=ocp.args.StandardSave(nested)))
        manager.wait_until_finished()
    names = {name: f"rest.{name}" for name in parameters} | {"token_embedding": "embed"}
    describe(tmp_path / "run", checkpoint="7/state", names=names, ignore=["st?p"])
    assert_equal(load_checkpoint(tmp_path / "run", dtype=np.float32).parameters, parameters)


def test_a_map_that_transposes_and_reshapes(tmp_path: Path, parameters: dict[str, jax.Array]) -> None:
    p, heads = parameters, (CONFIG.n_heads, CONFIG.head_size)
    h = CONFIG.hidden_size
    blocks: list[Tree] = []
    for i in range(CONFIG.n_layers):
        mine = {name.split(".", 2)[2]: value for name, value in p.items() if name.startswith(f"layers.{i}.")}
        weight, bias = mine["qkv.weight"], mine["qkv.bias"]
        block: Tree = {
            part: {"kernel": weight[j].T.reshape(h, *heads), "bias": bias[j].reshape(heads)}
            for j, part in enumerate("qkv")
        }
        block["out"] = {"kernel": mine["out.weight"].T.reshape(*heads, h), "bias": mine["out.bias"]}
        for part in ("up", "down"):
            block[part] = {"kernel": mine[f"{part}.weight"].T, "bias": mine[f"{part}.bias"]}
        for part in ("attn_norm", "mlp_norm"):
            block[part] = {"scale": mine[f"{part}.scale"], "bias": mine[f"{part}.bias"]}
        blocks.append(block)
    save(
        tmp_path / "model",
        {
            "tokens": p["token_embedding"],
            "positions": p["position_embedding"],
            "blocks": blocks,
            "norm": {"scale": p["final_norm.scale"], "bias": p["final_norm.bias"]},
        },
    )
    names: Tree = {
        "token_embedding": "tokens",
        "position_embedding": "positions",
        "final_norm.scale": "norm.scale",
        "final_norm.bias": "norm.bias",
        "layers.{i}.qkv.weight": {
            "name": [f"blocks.{{i}}.{part}.kernel" for part in "qkv"],
            "transpose": True,
            "reshape": True,
        },
        "layers.{i}.qkv.bias": {"name": [f"blocks.{{i}}.{part}.bias" for part in "qkv"], "reshape": True},
        "layers.{i}.out.weight": {"name": "blocks.{i}.out.kernel", "transpose": True, "reshape": True},
        "layers.{i}.out.bias": "blocks.{i}.out.bias",
    }
    for part in ("up", "down"):
        names[f"layers.{{i}}.{part}.weight"] = {"name": f"blocks.{{i}}.{part}.kernel", "transpose": True}
        names[f"layers.{{i}}.{part}.bias"] = f"blocks.{{i}}.{part}.bias"
    for part in ("attn_norm", "mlp_norm"):
        for leaf in ("scale", "bias"):
            names[f"layers.{{i}}.{part}.{leaf}"] = f"blocks.{{i}}.{part}.{leaf}"
    describe(tmp_path / "model", names=names)
    assert_equal(load_checkpoint(tmp_path / "model", dtype=np.float32).parameters, parameters)

    del names["layers.{i}.out.weight"]["reshape"]
    describe(tmp_path / "model", names=names)
    shape = str([*heads, h])
    fails(TensorMismatch, tmp_path / "model", "blocks.0.out.kernel", "[64, 64]", shape, '"reshape": true')


# --- half-written


def test_a_directory_that_orbax_did_not_rename(copy: Path) -> None:
    unfinished = copy.rename(copy.with_name("model.orbax-checkpoint-tmp-12"))
    fails(CorruptFile, unfinished, "half-written", ".orbax-checkpoint-tmp")


def test_no_tree(copy: Path) -> None:
    (copy / "_METADATA").unlink()
    fails(CorruptFile, copy, str(copy), "half-written", "_METADATA")


def test_no_commit(copy: Path) -> None:
    path = copy / "_CHECKPOINT_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"commit_timestamp_nsecs": None}))
    fails(CorruptFile, copy, "half-written", "_CHECKPOINT_METADATA", "commit")


def test_a_step_that_was_not_committed(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run" / "3" / "state")
    shutil.move(tmp_path / "run" / "3" / "state" / "_CHECKPOINT_METADATA", tmp_path / "run" / "3")
    describe(tmp_path / "run", checkpoint="3/state")
    assert load_checkpoint(tmp_path / "run", dtype=np.float32).parameters
    path = tmp_path / "run" / "3" / "_CHECKPOINT_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"commit_timestamp_nsecs": None}))
    fails(CorruptFile, tmp_path / "run", "half-written", "commit")


def test_the_place_above_is_named(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "3" / "default")
    describe(tmp_path)
    fails(CorruptFile, tmp_path, "_METADATA", '"checkpoint": "3/default"')


# --- missing shards


@pytest.mark.parametrize("victim", ["manifest.ocdbt", "d/*", "ocdbt.process_0/d/*"])
@pytest.mark.parametrize("half", [False, True])
def test_files_that_are_missing_or_cut(copy: Path, victim: str, half: bool) -> None:
    found = [path for path in copy.glob(victim) if path.is_file()]
    assert found
    for path in found:
        if half:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        else:
            path.unlink()
    fails(CorruptFile, copy, str(copy))


def test_a_chunk_that_is_missing(tmp_path: Path, parameters: dict[str, jax.Array]) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "model", args=ocp.args.PyTreeSave(parameters))
    describe(tmp_path / "model")
    (tmp_path / "model" / "layers.1.up.weight" / "0.0").unlink()
    fails(CorruptFile, tmp_path / "model", "layers.1.up.weight", "cannot be read")
    shutil.rmtree(tmp_path / "model" / "layers.1.up.weight")
    fails(CorruptFile, tmp_path / "model", "layers.1.up.weight", "cannot be opened")


# --- the wrong tree


def changed(tmp_path: Path, parameters: dict[str, jax.Array], **changes: Any) -> Path:
    tree = {**parameters, **changes}
    save(tmp_path / "model", {name: value for name, value in tree.items() if value is not None})
    describe(tmp_path / "model")
    return tmp_path / "model"


def test_a_missing_parameter(tmp_path: Path, parameters: dict[str, jax.Array]) -> None:
    directory = changed(tmp_path, parameters, **{"layers.1.up.bias": None})
    fails(TensorMismatch, directory, "'layers.1.up.bias' is missing", "orca.json")


def test_parameters_too_many(tmp_path: Path, parameters: dict[str, jax.Array]) -> None:
    directory = changed(tmp_path, parameters, adapter={"a": np.ones(3), "b": np.ones(3)})
    fails(TensorMismatch, directory, "2 arrays are left over", "adapter.a", '"ignore"')


def test_a_wrong_shape(tmp_path: Path, parameters: dict[str, jax.Array]) -> None:
    directory = changed(tmp_path, parameters, **{"layers.0.qkv.weight": np.ones((64, 192), "f4")})
    fails(TensorMismatch, directory, "'layers.0.qkv.weight'", "expected shape [3, 64, 64]", "[64, 192]")


def test_a_wrong_dtype(tmp_path: Path, parameters: dict[str, jax.Array]) -> None:
    directory = changed(tmp_path, parameters, **{"final_norm.bias": np.ones(64, np.int32)})
    fails(TensorMismatch, directory, "'final_norm.bias'", "expected dtype float32, bfloat16", "found int32")


@pytest.mark.parametrize(
    "change",
    [
        {"tree_metadata": 3},
        {"tree_metadata": {"x": 3}},
        {"tree_metadata": {"x": {"key_metadata": [{"key": 3}], "value_metadata": {}}}},
        {"tree_metadata": {"x": {"key_metadata": [{"key": "../../x"}], "value_metadata": {}}}},
    ],
)
def test_a_tree_that_makes_no_sense(copy: Path, change: dict[str, Any]) -> None:
    path = copy / "_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    fails(CorruptFile, copy, "_METADATA")


# --- orca.json


def test_nothing_says_which_model(copy: Path) -> None:
    (copy / "orca.json").unlink()
    fails(NotACheckpoint, copy, "neither orca.json nor config.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": None}, ["model", "object"]),
        ({"model": MODEL | {"hidden_size": "64"}}, ["model.hidden_size", "whole number"]),
        ({"model": MODEL | {"hidden_size": True}}, ["model.hidden_size", "whole number"]),
        ({"model": MODEL | {"hidden_size": 63}}, ["hidden_size 63", "multiple of n_heads"]),
        ({"model": MODEL | {"embedding_size": 0}}, ["embedding_size", "at least 1"]),
        ({"model": MODEL | {"use_bias": 1}}, ["model.use_bias", "true or false"]),
        ({"model": MODEL | {"activation": "swish"}}, ["activation", "gelu_tanh", "swish"]),
        ({"model": MODEL | {"vocab_multiple": 8}}, ["model.vocab_multiple"]),
        ({"model": {"vocab_size": 11}}, ["model.n_positions"]),
        ({"model": MODEL | {"eos_token_ids": [11]}}, ["special token", "11"]),
        ({"weights": 1}, ["weights", "expected one of"]),
        ({"checkpoint": "../elsewhere"}, ["checkpoint", "below"]),
        ({"checkpoint": "/etc"}, ["checkpoint", "below"]),
        ({"ignore": "x"}, ["ignore", "list"]),
        ({"names": {"token_embedding": "x"}}, ["names", "position_embedding"]),
        ({"names": []}, ["names", "object"]),
    ],
)
def test_a_description_that_is_wrong(copy: Path, change: dict[str, Any], words: list[str]) -> None:
    describe(copy, **change)
    fails(BadModelConfig, copy, "orca.json", *words)


@pytest.mark.parametrize(
    ("name", "entry", "words"),
    [
        ("final_norm.bias", 3, ["names.final_norm.bias", "name"]),
        ("final_norm.bias", {"name": []}, ["names.final_norm.bias", "name"]),
        ("final_norm.bias", {"name": "final_norm.bias", "flip": True}, ["flip", "transpose"]),
        ("final_norm.bias", {"name": "final_norm.bias", "transpose": 1}, ["transpose", "true or false"]),
        ("layers.{i}.adapter", "x", ["layers.{i}.adapter", "no names but"]),
    ],
)
def test_a_map_that_is_wrong(copy: Path, name: str, entry: object, words: list[str]) -> None:
    names: dict[str, object] = {one: one for one in parameter_shapes(CONFIG)}
    describe(copy, names=names | {name: entry})
    fails(BadModelConfig, copy, "orca.json", *words)
