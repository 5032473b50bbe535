"""Conversion: a round trip gives the same bytes, and Orbax itself reads the result."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors import safe_open

from orca_jax.checkpoint import orbax_store
from orca_jax.checkpoint.convert import convert_checkpoint
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.errors import CheckpointError, ConfigError, UnsupportedModel
from orca_jax.families.hf_config import hf_config_of, read_config
from orca_jax.families.model_config import LearnedPositions
from orca_jax.families.parameters import parameter_shapes
from tests.device.checkpoint.tiny_checkpoint import (
    DTYPES,
    GPT2,
    OPT,
    Tensors,
    gpt2_tensors,
    opt_tensors,
    write_checkpoint,
    write_json,
)
from tests.device.model.golden import NAMES, load_golden
from tests.gpt_config import flat_options


def read(directory: Path) -> Tensors:
    """All tensors, by safetensors' own library."""
    result: Tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            result |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return result


@pytest.mark.parametrize("stored", ["F32", "BF16", "F16"])
@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        (GPT2, gpt2_tensors()),
        (GPT2 | {"tie_word_embeddings": False}, gpt2_tensors(GPT2 | {"tie_word_embeddings": False})),
        (OPT, opt_tensors()),
        (
            OPT | {"enable_bias": False, "do_layer_norm_before": False},
            opt_tensors(OPT | {"enable_bias": False, "do_layer_norm_before": False}),
        ),
    ],
    ids=["gpt2", "gpt2-untied", "opt", "opt-post"],
)
def test_there_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str, config: dict[str, Any], tensors: Tensors
) -> None:
    monkeypatch.setattr(orbax_store, "_CHUNK_BYTES", 64)
    tensors = {name: value.astype(DTYPES[stored]) for name, value in tensors.items()}
    first = write_checkpoint(tmp_path / "first", config, tensors, n_files=2)
    write_json(first / "tokenizer.json", {"model": {"vocab": {"a": 0}}})
    (first / "chat_template.jinja").write_text("{{ messages }}")
    (first / "additional_chat_templates").mkdir()
    (first / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    (first / "pytorch_model.bin").write_bytes(b"not to be copied")

    progress: list[tuple[int, int]] = []
    to = convert_checkpoint(first, tmp_path / "orbax", on_bytes=lambda done, of: progress.append((done, of)))
    assert to == "orbax"
    assert progress[-1][0] == progress[-1][1] == sum(value.nbytes for value in tensors.values())
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "orbax")
    loaded = load_checkpoint(first, dtype=np.float32)
    assert {name: value.shape for name, value in restored.items()} == parameter_shapes(loaded.config)
    for name, value in loaded.parameters.items():
        assert restored[name].dtype == DTYPES[stored]
        np.testing.assert_array_equal(np.asarray(value), restored[name].astype("f4"), name)

    assert convert_checkpoint(tmp_path / "orbax", tmp_path / "back", max_file_bytes=300) == "safetensors"
    assert len([*(tmp_path / "back").glob("*.safetensors")]) > 2
    back = read(tmp_path / "back")
    assert set(back) == set(tensors)
    for name, value in tensors.items():
        assert back[name].dtype == value.dtype
        assert back[name].tobytes() == value.tobytes(), name
    templates = ("chat_template.jinja", "additional_chat_templates/rag.jinja")
    for name in ("config.json", "tokenizer.json", *templates):
        for place in ("orbax", "back"):
            assert json_or_text(tmp_path / place / name) == json_or_text(first / name)
    assert not (tmp_path / "orbax" / "pytorch_model.bin").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "first", "orbax"]


def json_or_text(path: Path) -> object:
    return json.loads(path.read_text()) if path.suffix == ".json" else path.read_text()


def test_orbax_and_back(tmp_path: Path) -> None:
    """A checkpoint that never was Hugging Face's gets the layout that follows from its model."""
    loaded = load_checkpoint(write_checkpoint(tmp_path / "first", GPT2, gpt2_tensors()), dtype=np.float32)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "trained", loaded.parameters)
    needed = ("vocab_size", "n_positions", "hidden_size", "n_layers", "n_heads", "ffn_size")
    options = flat_options(loaded.config)
    assert options is not None
    fields = {name: options[name] for name in needed}
    write_json(
        tmp_path / "trained" / "orca.json",
        {"model": fields | {"bos_token_id": 0, "eos_token_ids": [10]}},
    )
    convert_checkpoint(tmp_path / "trained", tmp_path / "hf")
    back = read(tmp_path / "hf")
    for name, value in gpt2_tensors().items():
        np.testing.assert_array_equal(back[name], value, name)
    assert read_config(tmp_path / "hf") == loaded.config
    assert not (tmp_path / "hf" / "orca.json").exists()


def test_numbers_without_an_axis_there_and_back(tmp_path: Path) -> None:
    first = load_golden("apertus-llama3").directory
    convert_checkpoint(first, tmp_path / "orbax")
    convert_checkpoint(tmp_path / "orbax", tmp_path / "back")
    before, back = read(first), read(tmp_path / "back")
    assert before.keys() == back.keys()
    assert {before[f"model.layers.0.mlp.act_fn.{name}"].shape for name in ("beta", "eps")} == {()}
    for name, value in before.items():
        assert (back[name].shape, back[name].tobytes()) == (value.shape, value.tobytes()), name


@pytest.mark.parametrize("name", NAMES)
def test_a_written_config_reads_as_the_same_model(tmp_path: Path, name: str) -> None:
    config = read_config(load_golden(name).directory)
    write_json(tmp_path / "config.json", hf_config_of(config))
    assert read_config(tmp_path) == config


def test_a_model_without_a_layout(tmp_path: Path) -> None:
    config = read_config(write_checkpoint(tmp_path, OPT, opt_tensors()))
    config = replace(config, positions=LearnedPositions(offset=1))
    with pytest.raises(UnsupportedModel, match=r"no config\.json of GPT-2, OPT"):
        hf_config_of(config)


def test_weights_are_converted_to_another_dtype(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path / "first", GPT2 | {"torch_dtype": "float32"}, gpt2_tensors())
    convert_checkpoint(first, tmp_path / "orbax", dtype="bfloat16")
    convert_checkpoint(tmp_path / "orbax", tmp_path / "back")
    for name, value in read(tmp_path / "back").items():
        expected = gpt2_tensors()[name].astype(ml_dtypes.bfloat16)
        assert value.dtype == expected.dtype and value.tobytes() == expected.tobytes()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path / "first", GPT2, gpt2_tensors())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file", "first"):
        with pytest.raises(ConfigError, match=f"{name} already exists"):
            convert_checkpoint(first, tmp_path / name)
    assert (tmp_path / "full" / "x").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    convert_checkpoint(first, tmp_path / "empty")
    convert_checkpoint(first, tmp_path / "new" / "deep")
    assert load_checkpoint(tmp_path / "new" / "deep", dtype=np.float32).parameters


def test_a_destination_that_cannot_be_written(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path / "first", GPT2, gpt2_tensors())
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        convert_checkpoint(first, tmp_path / "file" / "below")


def test_a_source_that_breaks_leaves_nothing(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path / "first", GPT2, gpt2_tensors())
    convert_checkpoint(first, tmp_path / "orbax")
    for path in (tmp_path / "orbax" / "d").iterdir():
        path.write_bytes(b"")
    with pytest.raises(CheckpointError):
        convert_checkpoint(tmp_path / "orbax", tmp_path / "back")
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        convert_checkpoint(first, tmp_path / "other", dtype="int8")  # pyright: ignore[reportArgumentType]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "orbax"]
