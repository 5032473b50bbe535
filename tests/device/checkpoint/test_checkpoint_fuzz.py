"""Random and mutated files: reading a checkpoint works or raises a CheckpointError, and nothing else."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.checkpoint.huggingface import find_tensors
from orca_jax.checkpoint.safetensors_reader import read_header
from orca_jax.errors import CheckpointError
from orca_jax.families.hf_config import read_config
from orca_jax.model_files.found_model import read_generation_defaults
from tests.device.checkpoint.tiny_checkpoint import (
    GPT2,
    OPT,
    file_bytes,
    gpt2_tensors,
    header_and_data,
    write_checkpoint,
    write_json,
)

fuzz = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, 2, 4, 11, 16, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, 1 << 64, 1 << 200]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.sampled_from(
        ["F32", "BF16", "F16", "I64", "BOOL", "gpt2", "opt", "relu", "../x", "model.safetensors"]
    ),
)
VALUES = st.recursive(ODD, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@fuzz
@given(content=st.binary(max_size=200))
def test_random_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        read_header(path)


@fuzz
@given(values=VALUES, tail=st.binary(max_size=40))
def test_random_headers_are_read_or_refused(tmp_path: Path, values: Any, tail: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes(values, tail))
    try:
        tensors = read_header(path)
    except CheckpointError:
        return
    # The one thing random values can say that is true: nothing at all, or tensors of no bytes.
    assert sum(tensor.n_bytes for tensor in tensors.values()) == len(tail)


def mutate(data: st.DataObject, value: Any) -> Any:
    """`value` with one part, anywhere inside it, replaced, dropped or repeated."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value)))
        action = data.draw(st.sampled_from(["inside", "inside", "replace", "drop", "rename"]))
        rest = {name: entry for name, entry in value.items() if name != key}
        if action == "drop":
            return rest
        if action == "rename":
            return rest | {data.draw(st.text()): value[key]}
        return value | {key: mutate(data, value[key]) if action == "inside" else data.draw(VALUES)}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        i = data.draw(st.integers(0, len(value) - 1))
        return [*value[:i], mutate(data, value[i]), *value[i + 1 :]]
    return data.draw(VALUES)


@fuzz
@given(data=st.data())
def test_mutated_headers_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    tensors = {name: gpt2_tensors()[name] for name in ("transformer.ln_f.weight", "transformer.ln_f.bias")}
    header, raw = header_and_data(tensors)
    path = tmp_path / "model.safetensors"
    content = file_bytes(mutate(data, header), raw)
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    path.write_bytes(content)
    try:
        result = read_header(path)
    except CheckpointError:
        return
    for tensor in result.values():  # what is let through lies inside the file
        assert 0 <= tensor.offset <= tensor.offset + tensor.n_bytes <= len(content)


@fuzz
@given(at=st.integers(0, 3000), byte=st.integers(0, 255))
def test_one_wrong_byte(tmp_path: Path, at: int, byte: int) -> None:
    write_checkpoint(tmp_path, GPT2, gpt2_tensors())
    path = tmp_path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[at % len(content)] = byte
    path.write_bytes(content)
    try:
        find_tensors(tmp_path)
    except CheckpointError:
        pass


@settings(fuzz, max_examples=30)
@given(data=st.data())
def test_a_mutated_checkpoint(tmp_path: Path, data: st.DataObject) -> None:
    header, raw = header_and_data(gpt2_tensors())
    write_json(tmp_path / "config.json", mutate(data, GPT2) if data.draw(st.booleans()) else GPT2)
    (tmp_path / "model.safetensors").write_bytes(file_bytes(mutate(data, header), raw))
    try:
        load_checkpoint(tmp_path, dtype=np.float32)
    except CheckpointError:
        pass


@fuzz
@given(data=st.data(), base=st.sampled_from([GPT2, OPT]))
def test_mutated_configs_are_read_or_refused(
    tmp_path: Path, data: st.DataObject, base: dict[str, Any]
) -> None:
    write_json(tmp_path / "config.json", mutate(data, base))
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2}]}
    write_json(tmp_path / "tokenizer.json", mutate(data, tokenizer))
    try:
        read_config(tmp_path)
    except CheckpointError:
        pass


@fuzz
@given(data=st.data())
def test_mutated_generation_configs(tmp_path: Path, data: st.DataObject) -> None:
    values = {
        "eos_token_id": [10, 2],
        "temperature": 0.6,
        "top_k": 50,
        "max_new_tokens": 9,
        "do_sample": True,
    }
    write_json(tmp_path / "generation_config.json", mutate(data, values))
    try:
        assert str(read_generation_defaults(tmp_path, "auto"))
    except CheckpointError:
        pass


@fuzz
@given(
    content=st.binary(max_size=100)
    | st.text(max_size=100).map(str.encode)
    | VALUES.map(json.dumps).map(str.encode)
)
def test_random_configs_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError):
        read_config(tmp_path)


@fuzz
@given(data=st.data())
def test_mutated_indexes_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    write_checkpoint(tmp_path, GPT2, gpt2_tensors(), n_files=2)
    index = tmp_path / "model.safetensors.index.json"
    write_json(index, mutate(data, json.loads(index.read_text())))
    try:
        find_tensors(tmp_path)
    except CheckpointError:
        pass
