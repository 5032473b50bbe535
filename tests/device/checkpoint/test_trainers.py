"""Checkpoints that trainers saved (scripts/golden/tunix.py and its like): their logits and tokens."""

import json
import math
import re
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from orca_jax.checkpoint import zarr_store
from orca_jax.checkpoint.convert import convert_checkpoint
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.checkpoint.orbax import open_chosen
from orca_jax.config import Format, ServingConfig
from orca_jax.errors import (
    BadModelConfig,
    CheckpointError,
    ConfigError,
    CorruptFile,
    TensorMismatch,
    UnsupportedModel,
)
from orca_jax.families.hf_config import read_config
from orca_jax.families.parameters import parameter_shapes
from orca_jax.families.presets import PRESETS
from orca_jax.families.stored_name import StoredName
from orca_jax.families.trainers.layouts import ITEMS, detect, written_names
from orca_jax.families.trainers.orca_json import read_description
from orca_jax.model import reference
from tests.device.checkpoint.dense_parts import dense_parts
from tests.device.harness import greedy_request, harness
from tests.places import DATA

DIRECTORY = DATA / "trainers"
NAMES = tuple(sorted(path.parent.name for path in DIRECTORY.glob("*/golden.npz")))
_QUICK = ("gemma-gemma3", "maxtext-llama2-scanned", "maxtext-llama3.1", "tunix-llama3")
SOME = [pytest.param(name, marks=() if name in _QUICK else pytest.mark.long) for name in NAMES]


@dataclass(frozen=True)
class Golden:
    """The logits and tokens that a trainer computes with its checkpoint."""

    directory: Path
    prompts: np.ndarray  # [n, length]
    logits: np.ndarray  # [n, length, V]
    tokens: np.ndarray  # [n, 8]


@cache
def golden_of(name: str) -> Golden:
    with np.load(DIRECTORY / name / "golden.npz") as arrays:
        return Golden(DIRECTORY / name, arrays["prompts"], arrays["logits"], arrays["tokens"])


@pytest.mark.parametrize("name", SOME)
def test_the_trainers_logits(name: str) -> None:
    golden = golden_of(name)
    checkpoint = load_checkpoint(golden.directory, dtype=jnp.float32)
    forward = jax.jit(reference.forward, static_argnums=0)
    for prompt, expected in zip(golden.prompts, golden.logits, strict=True):
        logits = forward(checkpoint.config, checkpoint.parameters, jnp.array(prompt))
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_serving_gives_the_trainers_tokens(name: str) -> None:
    golden = golden_of(name)
    checkpoint = load_checkpoint(golden.directory, dtype=jnp.float32)
    serving = ServingConfig(max_batch_size=4, n_slots=256, max_batch_tokens=64)
    engine = harness(checkpoint.config, checkpoint.parameters, serving, buckets=(64,))
    n = golden.tokens.shape[1]
    outputs = engine.run([greedy_request(str(i), prompt, n) for i, prompt in enumerate(golden.prompts)])
    for i, expected in enumerate(golden.tokens):
        assert [*outputs[str(i)]] == expected.tolist()


def arrays_of(directory: Path) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint, by their keys joined with dots."""
    stores = open_chosen(directory, lambda names: names)
    return {name: store.read().result() for name, store in stores.items()}


def rounded(names: dict[str, StoredName]) -> set[str]:
    """The names of arrays whose conversion rounds; a factor that is a power of two does not."""
    return {
        theirs
        for stored in names.values()
        for theirs, form in zip(stored.names, stored.forms, strict=True)
        if math.frexp(form.multiply)[0] != 0.5 or form.add != 0
    }


@pytest.mark.parametrize("name", SOME)
def test_to_safetensors_and_back(name: str, tmp_path: Path) -> None:
    """The result has the trainer's names and shapes, and the same bits where nothing is rounded."""
    description = read_description(DIRECTORY / name)
    expected = arrays_of(description.checkpoint)
    detected = detect(description.model, expected)
    assert detected is not None
    convert_checkpoint(DIRECTORY / name, tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "back", to=detected.layout)
    found = arrays_of(tmp_path / "back" / ITEMS[detected.layout])
    names = written_names(description.model, detected.layout)
    if name == "levanter-llama-apart":  # it is written with layers in one array
        again = load_checkpoint(tmp_path / "back", dtype=np.float32).parameters
        for ours, values in load_checkpoint(DIRECTORY / name, dtype=np.float32).parameters.items():
            np.testing.assert_array_equal(again[ours], values, ours)
        return
    assert set(found) == {theirs for stored in names.values() for theirs in stored.names}
    for ours, stored in names.items():
        for theirs, source in zip(stored.names, detected.names[ours].names, strict=True):
            if ours.endswith("router.correction") and theirs != source:
                # No parameter in MaxText's training state; it looks for it in both places.
                assert source == theirs.replace("params.params.", "nnx_aux.model.")
                np.testing.assert_array_equal(found[theirs], expected[source])
                continue
            assert theirs == source or "flat" in name
            if name == "gemma-gemma2" and theirs.endswith("gating_einsum"):
                # In the order of Gemma 2 2B; models of other sizes have the other one, which is written.
                np.testing.assert_array_equal(found[theirs].swapaxes(1, 2), expected[source])
                continue
            if theirs in rounded(names):
                np.testing.assert_allclose(found[theirs], expected[source], rtol=1e-6, atol=1e-7)
            else:
                np.testing.assert_array_equal(found[theirs], expected[source])


@pytest.mark.parametrize("name", NAMES)
def test_any_part_is_that_slice_of_the_whole(name: str) -> None:
    generator = np.random.default_rng(1)
    model, parts = dense_parts(DIRECTORY / name)
    for parameter, shape in parameter_shapes(model).items():
        whole = parts[parameter].read(shape, np.dtype("f4"), tuple((0, n) for n in shape))
        for _ in range(2):
            ends = [sorted(generator.choice(n + 1, 2, replace=False)) for n in shape]
            box = tuple((int(first), int(end)) for first, end in ends)
            part = parts[parameter].read(shape, np.dtype("f4"), box)
            np.testing.assert_array_equal(part, whole[tuple(slice(*ends) for ends in box)], parameter)


@pytest.fixture
def tunix(tmp_path: Path) -> Path:
    return shutil.copytree(DIRECTORY / "tunix-llama3", tmp_path / "tunix")


def write(directory: Path, description: dict[str, Any]) -> None:
    (directory / "orca.json").write_text(json.dumps(description))


def test_conversions_between_trainers_keep_the_weights(tunix: Path, tmp_path: Path) -> None:
    expected = load_checkpoint(tunix, dtype=np.float32)
    source = tunix
    formats: tuple[Format, ...] = ("maxtext-scanned", "maxtext", "tunix", "orbax", "safetensors")
    for to in formats:
        target = tmp_path / f"to-{to}"
        assert convert_checkpoint(source, target, to=to) == to
        loaded = load_checkpoint(target, dtype=np.float32)
        assert loaded.config == expected.config
        for name, values in expected.parameters.items():
            np.testing.assert_allclose(loaded.parameters[name], values, rtol=1e-6, atol=0, err_msg=name)
        source = target


def test_the_last_step_or_another(tunix: Path) -> None:
    shutil.copytree(tunix / "3", tunix / "12")
    shutil.copytree(tunix / "3", tunix / "x")
    assert read_description(tunix).checkpoint == tunix / "12" / "model_params"
    write(tunix, {"checkpoint": "3/model_params"})
    description = read_description(tunix)
    assert description.checkpoint == tunix / "3" / "model_params"
    assert description.model == read_config(tunix)
    write(tunix, {"model": "llama-3.1-8b"})
    assert read_description(tunix).model == PRESETS["llama-3.1-8b"]


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"num_hidden_layers": 3}, TensorMismatch, "layers.2.attn.q_proj.w.value"),
        ({"num_hidden_layers": 1}, TensorMismatch, "left over"),
        ({"num_key_value_heads": 4}, TensorMismatch, r"\[32, 4, 8\] \(H K D\).*found \[32, 2, 8\]"),
        ({"intermediate_size": 47}, TensorMismatch, r"expected shape \[32, 47\]"),
        ({"vocab_size": 97}, TensorMismatch, r"expected shape \[97, 32\]"),
        ({"attention_bias": True}, UnsupportedModel, "out.bias"),
        ({"tie_word_embeddings": True}, TensorMismatch, "lm_head"),
    ],
)
def test_a_config_of_another_model_is_refused(
    tunix: Path, change: dict[str, Any], error: type[CheckpointError], words: str
) -> None:
    config = json.loads((tunix / "config.json").read_text()) | change
    (tunix / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=words):
        load_checkpoint(tunix, dtype=np.float32)


def test_a_padded_vocabulary(tunix: Path) -> None:
    whole = load_checkpoint(tunix, dtype=np.float32)
    config = json.loads((tunix / "config.json").read_text()) | {"vocab_size": 90}
    (tunix / "config.json").write_text(json.dumps(config))
    loaded = load_checkpoint(tunix, dtype=np.float32)
    for name in ("token_embedding", "head.weight"):
        np.testing.assert_array_equal(loaded.parameters[name], whole.parameters[name][:90])


def test_orca_json_describes_each_form_of_an_array(tunix: Path, tmp_path: Path) -> None:
    """A made-up checkpoint that uses each form once: layers, keys and values stacked, and so on."""
    expected = load_checkpoint(tunix, dtype=np.float32).parameters
    stored = {
        name.removesuffix(".value"): values for name, values in arrays_of(tunix / "3/model_params").items()
    }

    def both(name: str) -> np.ndarray:
        return np.stack([stored[f"layers.{i}.{name}"] for i in range(2)])

    def neighbours(values: np.ndarray) -> np.ndarray:
        first, second = np.split(values, 2, axis=-1)
        return np.stack([first, second], axis=-1).reshape(values.shape)

    q, k, v = (both(f"attn.{part}_proj.w") for part in "qkv")
    tree = {
        "q": neighbours(q).swapaxes(1, 2),  # [L, N, H, D]
        "kv": np.stack([neighbours(k), v], axis=1),  # [L, 2, H, K, D]
        "o": both("attn.o_proj.w"),
        "gate_up": np.stack([both(f"mlp.{part}_proj.kernel") for part in ("gate", "up")]),  # [2, L, H, F]
        "down": both("mlp.down_proj.kernel") * 4,
        "norm_1": both("input_layernorm.w") - 1,
        "norm_2": both("post_attention_layernorm.w"),
        "norm": stored["final_norm.w"],
        "tokens": stored["embedder.input_embedding"],
        "head": stored["lm_head.w"].T.reshape(96, 8, 4),
    }
    directory = tmp_path / "mine"
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(directory, tree)
    shutil.copy(tunix / "config.json", directory)
    kv = {"name": "kv", "axes": "L 2 H K D"}
    names: dict[str, Any] = {
        "token_embedding": "tokens",
        "layers.{i}.qkv.weight": {
            "name": [
                {"name": "q", "axes": "L N H D", "permute_rope": True},
                kv | {"part": 0, "permute_rope": True},
                kv | {"part": 1},
            ]
        },
        "layers.{i}.out.weight": {"name": "o", "axes": "L N D H", "heads": "queries"},
        "layers.{i}.up.weight": {
            "name": [{"name": "gate_up", "part": 0}, {"name": "gate_up", "part": 1}],
            "axes": "2 L H F",
        },
        "layers.{i}.down.weight": {"name": "down", "axes": "L F H", "multiply": 0.25},
        "layers.{i}.attn_norm.scale": {"name": "norm_1", "axes": "L H", "add": 1},
        "layers.{i}.mlp_norm.scale": {"name": "norm_2", "axes": "L H"},
        "final_norm.scale": "norm",
        "head.weight": {"name": "head", "reshape": True},
    }
    write(directory, {"names": names})
    loaded = load_checkpoint(directory, dtype=np.float32)
    for name, values in expected.items():
        np.testing.assert_allclose(loaded.parameters[name], values, rtol=1e-6, err_msg=name)

    for wrong, words in (
        ({"axes": "L N H Z"}, "names.layers.{i}.down.weight.axes"),
        ({"axes": "2 3 L F H"}, "at most one number"),
        ({"axes": "L F H", "part": 2}, "part"),
        ({"axes": "L F H", "multiply": 0}, "multiply"),
        ({"axes": "L F H", "transpose": True}, "instead of transpose"),
        ({"part": 1}, "axes"),
        ({"axes": 3}, "axes: expected text, found 3"),
    ):
        names["layers.{i}.down.weight"] = {"name": "down"} | wrong
        write(directory, {"names": names})
        with pytest.raises(BadModelConfig, match=re.escape(words)):
            load_checkpoint(directory, dtype=np.float32)


@pytest.fixture
def levanter(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("golden.npz")
    return shutil.copytree(DIRECTORY / "levanter-llama", tmp_path / "levanter", ignore=ignored)


def test_a_step_is_read_when_its_last_file_is_there(levanter: Path) -> None:
    for later in ("step-12", "step-100"):
        shutil.copytree(levanter / "step-3", levanter / later)
    (levanter / "step-100" / "metadata.json").unlink()
    assert read_description(levanter).checkpoint == levanter / "step-12"
    (levanter / "step-12" / "metadata.json").write_text('{"step": 12, "of": "another program"}')
    assert read_description(levanter).checkpoint == levanter / "step-3"
    load_checkpoint(levanter / "step-3", dtype=np.float32)
    (levanter / "step-3" / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match="weights are missing"):
        load_checkpoint(levanter, dtype=np.float32)


def test_an_incomplete_checkpoint_of_easydel(tmp_path: Path) -> None:
    directory = shutil.copytree(DIRECTORY / "easydel-llama", tmp_path / "easydel")
    (directory / "checkpoint_metadata.json").unlink()
    with pytest.raises(CheckpointError, match="which EasyDeL writes last"):
        load_checkpoint(directory, dtype=np.float32)


def test_zarr_arrays_that_are_missing_or_damaged(levanter: Path) -> None:
    model = levanter / "step-3" / "model"
    metadata = model / "transformer" / "norm" / "weight" / ".zarray"
    text = metadata.read_text()
    metadata.write_text("{")
    with pytest.raises(CorruptFile, match="weight' cannot be opened"):
        load_checkpoint(levanter, dtype=np.float32)
    metadata.write_text(text)
    (chunk,) = metadata.parent.glob("[0-9]*")
    chunk.write_bytes(b"no compressed data")
    with pytest.raises(CorruptFile, match="weight': its data cannot be read"):
        load_checkpoint(levanter, dtype=np.float32)
    shutil.rmtree(metadata.parent)
    with pytest.raises(TensorMismatch, match="weight' is missing"):
        load_checkpoint(levanter, dtype=np.float32)


def test_a_damaged_database(tmp_path: Path) -> None:
    directory = shutil.copytree(DIRECTORY / "levanter-qwen3-database", tmp_path / "database")
    (directory / "step-3" / "manifest.ocdbt").write_bytes(b"no manifest")
    with pytest.raises(CorruptFile, match="is not a database of arrays"):
        load_checkpoint(directory, dtype=np.float32)


def test_easydel_s_fields_in_config_json(tmp_path: Path) -> None:
    """Fields about sharding and kernels are left out; what changes the model is refused."""
    config = json.loads((DIRECTORY / "easydel-llama" / "config.json").read_text())
    for change, words in ((({"bits": 4}), "bits is 4"), ({"number_rep_kv": 2}, "number_rep_kv is 2")):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UnsupportedModel, match=words):
            read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = {"model_type": "llama", **{name: config[name] for name in _LLAMA_FIELDS}}
    found = read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert found == read_config(tmp_path)


_LLAMA_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
    *("tie_word_embeddings", "bos_token_id", "eos_token_id"),
)


def test_written_chunks_are_small_and_of_one_layer(tmp_path: Path) -> None:
    values = np.arange(3 * 1200 * 1000, dtype=np.float32).reshape(3, 1200, 1000)
    zarr_store.write(tmp_path / "x", ["a.b"], {"a.b": values}.__getitem__, index=False, apart={"a.b": (0,)})
    (store,) = zarr_store.open_arrays(zarr_store.read_tree(tmp_path / "x"), str).values()
    layout: Any = store.chunk_layout
    chunk = layout.read_chunk.shape
    assert chunk[0] == 1 and np.prod(chunk) * 4 <= 1 << 22
    np.testing.assert_array_equal(store.read().result(), values)


def test_an_unknown_format(tunix: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'torch'; it must be one of safetensors, orbax, tunix"):
        convert_checkpoint(tunix, tmp_path / "x", to="torch")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnsupportedModel, match="gemma has no model with"):
        convert_checkpoint(tunix, tmp_path / "x", to="gemma")
