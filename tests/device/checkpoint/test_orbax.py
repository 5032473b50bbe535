"""Orbax checkpoints as Orbax writes them, with and without a name map, and every kind of mistake."""

import json
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orca_jax.checkpoint import orbax, orbax_boxes, orbax_store
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.errors import BadModelConfig, CheckpointError, CorruptFile, NotACheckpoint, TensorMismatch
from orca_jax.families.parameters import parameter_shapes
from orca_jax.families.trainers.orca_json import described_model
from orca_jax.model.transformer import init_parameters
from tests.device.checkpoint.test_checkpoint_fuzz import mutate
from tests.gpt_config import gpt_config

MODEL: dict[str, Any] = {
    "vocab_size": 11,
    "n_positions": 6,
    "hidden_size": 64,
    "n_layers": 2,
    "n_heads": 2,
    "ffn_size": 80,
    "eos_token_ids": [10],
}
CONFIG = gpt_config(**{**MODEL, "eos_token_ids": (10,)})
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


def assert_equal(result: dict[str, jax.Array], expected: dict[str, jax.Array], dtype: Any = "f4") -> None:
    assert list(result) == list(parameter_shapes(CONFIG))
    for name, value in result.items():
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
    assert loaded.config == CONFIG == described_model(saved)[0]
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


def test_a_checkpoint_of_our_writer_before_orbax_wrote_for_us(
    tmp_path: Path, parameters: dict[str, jax.Array]
) -> None:
    """The older form: one OCDBT database without parts by process, a tree of flat names, no commit time."""
    place = tmp_path / "model"
    place.mkdir()
    tree: Tree = {}
    for name, value in parameters.items():
        kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{place}/"}, "path": name}
        chunks = [min(n, 24) for n in value.shape]
        metadata = {"chunks": chunks, "compressor": {"id": "zstd", "level": 1}}
        spec = {"driver": "zarr", "kvstore": kvstore, "metadata": metadata}
        store = ts.open(spec, create=True, shape=value.shape, dtype=ts.float32).result()
        store.write(np.asarray(value)).result()
        tree[f"('{name}',)"] = {
            "key_metadata": [{"key": name, "key_type": 2}],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
    about = {"tree_metadata": tree, "use_ocdbt": True, "use_zarr3": False}
    about |= {"store_array_data_equal_to_fill_value": True, "custom_metadata": None}
    (place / "_METADATA").write_text(json.dumps(about))
    describe(place)
    assert_equal(load_checkpoint(place, dtype=np.float32).parameters, parameters)


def test_chunks_that_an_old_orbax_left_out_are_zeros(
    tmp_path: Path, parameters: dict[str, jax.Array]
) -> None:
    """Old versions did not store chunks of zeros, and their tree does not say so."""
    place, name = tmp_path / "model", "layers.1.up.bias"
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(place, args=ocp.args.PyTreeSave(parameters))
    describe(place)
    (place / name / "0").unlink()
    fails(CorruptFile, place, name, "cannot be read")
    tree = json.loads((place / "_METADATA").read_text())
    del tree["store_array_data_equal_to_fill_value"]
    (place / "_METADATA").write_text(json.dumps(tree))
    expected = {**parameters, name: jnp.zeros_like(parameters[name])}
    assert_equal(load_checkpoint(place, dtype=np.float32).parameters, expected)


@pytest.mark.parametrize("piece_bytes", [1, 700, 1 << 23])
def test_pieces_of_any_size_are_the_array(
    tmp_path: Path, parameters: dict[str, jax.Array], monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(orbax_store, "_CHUNK_BYTES", 1024)
    arrays = {name: np.asarray(value) for name, value in parameters.items()}
    orbax.write(tmp_path / "model", arrays, arrays.__getitem__)
    describe(tmp_path / "model")
    monkeypatch.setattr(orbax_boxes, "_PIECE_BYTES", piece_bytes)
    assert_equal(load_checkpoint(tmp_path / "model", dtype=np.float32).parameters, parameters)


# --- what is written


def test_orbax_restores_written_arrays_onto_shardings(tmp_path: Path) -> None:
    values = {
        "b.bias": np.arange(7, dtype="f4"),
        "a": np.arange(24, dtype="f4").reshape(3, 4, 2).astype(ml_dtypes.bfloat16),
        "c.0.weight": np.zeros((5, 9), np.float16),  # a chunk of zeros is stored as well
    }
    orbax.write(tmp_path / "model", values, values.__getitem__)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
        for name, value in values.items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "model", target)
    assert restored.keys() == values.keys()
    for name, value in values.items():
        assert isinstance(restored[name], jax.Array) and restored[name].sharding == sharding
        assert restored[name].dtype == value.dtype
        np.testing.assert_array_equal(np.asarray(restored[name]), value, name)


def test_chunks_are_small_and_queries_keys_and_values_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orbax_store, "_CHUNK_BYTES", 256)
    arrays = {"qkv": np.ones((3, 8, 8), "f4"), "up": np.ones((36, 8), "f4"), "bias": np.ones(64, "f4")}
    orbax.write(tmp_path / "model", arrays, arrays.__getitem__, apart={"qkv": (0,)})
    located = {info.name: info for info in orbax_store.read_tree(tmp_path / "model")}
    opened = orbax_store.open_arrays(located, str, zeros_are_stored=True)
    chunks = {name: store.chunk_layout.read_chunk.shape for name, store in opened.items()}
    assert chunks == {"qkv": (1, 8, 8), "up": (6, 8), "bias": (64,)}


def test_arrays_are_written_one_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[np.ndarray]] = []

    def read(name: str) -> np.ndarray:
        assert not any(array() is not None for array in alive)
        array = np.full((300, 300), len(alive), "f4")
        alive.append(weakref.ref(array))
        return array

    orbax.write(tmp_path / "model", ["b", "a", "c"], read)
    assert len(alive) == 3


def test_writing_that_fails_leaves_no_checkpoint(tmp_path: Path) -> None:
    def read(name: str) -> np.ndarray:
        if name == "b":
            raise CorruptFile("the source is broken")
        return np.ones(3, "f4")

    with pytest.raises(CorruptFile, match="the source is broken"):
        orbax.write(tmp_path / "model", ["a", "b"], read)
    assert not (tmp_path / "model").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    with pytest.raises(CheckpointError, match="full cannot be written"):
        orbax.write(tmp_path / "full", ["a"], read)
    assert (tmp_path / "full" / "x").read_text() == "mine"


def test_serving_from_safetensors_loads_neither_orbax_nor_tensorstore() -> None:
    """Importing either would slow down the start."""
    code = (
        "import sys; from orca_jax import LLM\n"
        "with LLM() as llm: assert llm.generate(['a'])[0].token_ids\n"
        "assert 'orca_jax.checkpoint.orbax' in sys.modules\n"
        "loaded = [name for name in ('orbax.checkpoint', 'tensorstore') if name in sys.modules]\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


# --- half-written


def test_a_directory_that_orbax_did_not_rename(copy: Path) -> None:
    unfinished = copy.rename(copy.with_name("model.orbax-checkpoint-tmp-12"))
    fails(CorruptFile, unfinished, "incomplete", ".orbax-checkpoint-tmp")


def test_a_missing_tree_is_an_incomplete_checkpoint(copy: Path) -> None:
    (copy / "_METADATA").unlink()
    fails(CorruptFile, copy, str(copy), "incomplete", "_METADATA")


def test_a_missing_commit_time_is_an_incomplete_checkpoint(copy: Path) -> None:
    path = copy / "_CHECKPOINT_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"commit_timestamp_nsecs": None}))
    fails(CorruptFile, copy, "incomplete", "_CHECKPOINT_METADATA", "commit")


def test_a_step_that_was_not_committed(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run" / "3" / "state")
    shutil.move(tmp_path / "run" / "3" / "state" / "_CHECKPOINT_METADATA", tmp_path / "run" / "3")
    describe(tmp_path / "run", checkpoint="3/state")
    assert load_checkpoint(tmp_path / "run", dtype=np.float32).parameters
    path = tmp_path / "run" / "3" / "_CHECKPOINT_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"commit_timestamp_nsecs": None}))
    fails(CorruptFile, tmp_path / "run", "incomplete", "commit")


def test_the_place_above_is_named(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run" / "default")  # not a step: its name has no number alone
    describe(tmp_path)
    fails(CorruptFile, tmp_path, "_METADATA", '"checkpoint": "run/default"')


# --- missing shards


@pytest.mark.parametrize("victim", ["manifest.ocdbt", "d/*", "ocdbt.process_0/d/*"])
@pytest.mark.parametrize("half", [False, True])
def test_files_that_are_missing_or_cut(copy: Path, victim: str, half: bool) -> None:
    result = [path for path in copy.glob(victim) if path.is_file()]
    assert result
    for path in result:
        if half:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        else:
            path.unlink()
    fails(CorruptFile, copy, str(copy))


def test_a_missing_chunk(tmp_path: Path, parameters: dict[str, jax.Array]) -> None:
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
        {"tree_metadata": {}},
        {"tree_metadata": {"x": {"key_metadata": [], "value_metadata": {}}}},
    ],
)
def test_a_tree_that_makes_no_sense(copy: Path, change: dict[str, Any]) -> None:
    path = copy / "_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    fails(CorruptFile, copy, "_METADATA")


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ([("../../x", 2)], CorruptFile),  # outside of the directory
        ([("/etc/passwd", 2)], CorruptFile),
        ([(".hidden", 2)], CorruptFile),
        ([("a\0b", 2)], CorruptFile),
        ([("final_norm.scale", 2)], CorruptFile),  # a name that is there already
        ([("final_norm", 2), ("scale", 2)], CorruptFile),
        ([("x", 2), ("1000000000000", 1)], CorruptFile),  # a list with so many elements
        ([("x", 2), ("-1", 1)], CorruptFile),
        ([("x", 2), ("y", 1)], CorruptFile),
        ([("x", 7)], CorruptFile),
        ([("a", 2)] * 100_000, CorruptFile),  # nested so deep
        ([("a", 2)] * 50, TensorMismatch),  # an array too many
    ],
    ids=lambda value: str(value)[:30],
)
def test_keys_of_an_array_that_a_stranger_chose(
    copy: Path, keys: list[tuple[str, int]], error: type[CheckpointError]
) -> None:
    path = copy / "_METADATA"
    tree = json.loads(path.read_text())
    tree["tree_metadata"]["mine"] = {
        "key_metadata": [{"key": key, "key_type": kind} for key, kind in keys],
        "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
    }
    path.write_text(json.dumps(tree))
    fails(error, copy, "_METADATA" if error is CorruptFile else "left over")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_trees_are_read_or_refused(saved: Path, copy: Path, data: st.DataObject) -> None:
    tree = json.loads((saved / "_METADATA").read_text())
    (copy / "_METADATA").write_text(json.dumps(mutate(data, tree)))
    try:
        config, parts = orbax.find_parameters(copy)
    except CheckpointError:
        return
    assert config == CONFIG
    shapes = parameter_shapes(CONFIG)
    assert parts.keys() == shapes.keys()
    for name, part in parts.items():
        assert len(part.tensors) == 1
        assert np.prod(part.tensors[0].shape) == np.prod(shapes[name])


# --- orca.json


def test_a_checkpoint_without_a_model_name(copy: Path) -> None:
    (copy / "orca.json").unlink()
    fails(NotACheckpoint, copy, "neither orca.json nor config.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": None}, ["model", "object"]),
        ({"model": MODEL | {"hidden_size": "64"}}, ["model.hidden_size", "whole number"]),
        ({"model": MODEL | {"hidden_size": True}}, ["model.hidden_size", "whole number"]),
        ({"model": MODEL | {"hidden_size": 63}}, ["hidden_size 63", "multiple of n_heads"]),
        ({"model": MODEL | {"embedding_size": 0}}, ["embedding_size", "from 1"]),
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
def test_a_wrong_description(copy: Path, change: dict[str, Any], words: list[str]) -> None:
    describe(copy, **change)
    fails(BadModelConfig, copy, "orca.json", *words)


@pytest.mark.parametrize(
    ("name", "entry", "words"),
    [
        ("final_norm.bias", 3, ["names.final_norm.bias", "name"]),
        ("final_norm.bias", {"name": []}, ["names.final_norm.bias", "name"]),
        ("final_norm.bias", {"name": "final_norm.bias", "flip": True}, ["flip", "transpose"]),
        ("final_norm.bias", {"name": "final_norm.bias", "transpose": 1}, ["transpose", "true or false"]),
        ("layers.{i}.adapter", "x", ["layers.{i}.adapter", "only names of"]),
    ],
)
def test_wrong_names_of_arrays(copy: Path, name: str, entry: object, words: list[str]) -> None:
    names: dict[str, object] = {one: one for one in parameter_shapes(CONFIG)}
    describe(copy, names=names | {name: entry})
    fails(BadModelConfig, copy, "orca.json", *words)
