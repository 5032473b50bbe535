"""Checkpoints with one thing wrong: the error names the file, the tensor, and what was expected and found."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orca_jax.checkpoint import safetensors_reader
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.errors import (
    BadModelConfig,
    CheckpointError,
    CorruptFile,
    NotACheckpoint,
    TensorMismatch,
    UnsafeFile,
    UnsupportedModel,
)
from orca_jax.families.hf_config import read_config
from orca_jax.model_files.locate import find_directory
from tests.device.checkpoint.tiny_checkpoint import (
    GPT2,
    OPT,
    file_bytes,
    gpt2_tensors,
    header_and_data,
    opt_tensors,
    write_checkpoint,
    write_json,
)

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
NAME = "transformer.h.0.ln_1.weight"


def fails(error: type[CheckpointError], directory: Path | str, *words: str) -> None:
    """Check that finding and loading it raise exactly `error`, whose message has every word."""
    with pytest.raises(error) as raised:
        load_checkpoint(find_directory(directory), dtype=np.float32)
    assert type(raised.value) is error
    message = str(raised.value)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    assert message.isprintable() and len(message) < 1500


# --- the directory


def test_no_such_directory(tmp_path: Path) -> None:
    fails(NotACheckpoint, tmp_path / "missing", "no directory", "missing")
    fails(NotACheckpoint, "a\0b", "a\\x00b")


def test_a_directory_that_is_not_a_checkpoint(tmp_path: Path) -> None:
    fails(NotACheckpoint, tmp_path, str(tmp_path), "config.json")


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, GPT2, gpt2_tensors())
    fails(NotACheckpoint, tmp_path / MODEL, MODEL, "is a file", "directory")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    fails(UnsafeFile, tmp_path / "pytorch_model.bin", "pytorch_model.bin", "pickle")


def test_missing_weights_are_named(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", GPT2)
    fails(NotACheckpoint, tmp_path, str(tmp_path), MODEL, INDEX)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    fails(NotACheckpoint, tmp_path, "model-00001-of-00002.safetensors", "no index")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt", "model.pkl"])
def test_only_a_pickle(tmp_path: Path, name: str) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return (os.mkdir, (str(tmp_path / "ran"),))

    write_json(tmp_path / "config.json", GPT2)
    (tmp_path / name).write_bytes(pickle.dumps(Trap()))
    fails(UnsafeFile, tmp_path, name, "pickle", "save_pretrained")
    (tmp_path / name).rename(tmp_path / MODEL)
    fails(UnsafeFile, tmp_path, MODEL, "pickle", "safetensors")
    assert not (tmp_path / "ran").exists()


def test_a_pipe_in_place_of_a_file(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", GPT2)
    os.mkfifo(tmp_path / MODEL)
    fails(NotACheckpoint, tmp_path, MODEL, "not a regular file")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    fails(NotACheckpoint, tmp_path, "config.json", "not a regular file")


# --- the safetensors file


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["0 bytes", "header length"]),
        (b"\x02\0\0", ["3 bytes", "header length"]),
        (struct.pack("<Q", 1 << 42) + b"{}", ["header length", "at most 2 bytes", str(1 << 42)]),
        (struct.pack("<Q", (1 << 64) - 1) + b"{}", ["header length", str((1 << 64) - 1)]),
        (struct.pack("<Q", 3) + b"{}", ["header length", "at most 2 bytes", "found 3"]),
        (struct.pack("<Q", 0), ["JSON"]),
        (file_bytes(b"not json", b""), ["JSON"]),
        (file_bytes(b'{"a": "\xff"}', b""), ["JSON", "utf-8"]),
        (file_bytes(b"[1, 2]", b""), ["expected a JSON object", "[1, 2]"]),
        (file_bytes(b"[" * 100_000, b""), ["nested too deep"]),
        (file_bytes(b'{"a": NaN}', b""), ["NaN"]),
        (file_bytes(b'{"a": ' + b"9" * 10_000 + b"}", b""), ["JSON"]),
        (file_bytes(b'{"x": {"dtype": "F32", "dtype": "F16"}}', b""), ["'dtype'", "twice"]),
        (file_bytes(b'{"x": 1, "x": 1}', b""), ["'x'", "twice"]),
        (file_bytes({"__metadata__": [1]}, b""), ["__metadata__", "[1]"]),
        (file_bytes({"__metadata__": {"a": 1}}, b""), ["__metadata__"]),
        (file_bytes({}, b"1234"), ["expected 10 bytes", "found 14"]),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", ["Git LFS", "git lfs pull"]),
    ],
    ids=lambda value: ascii(value)[2:20] if isinstance(value, bytes) else "",
)
def test_a_file_that_is_not_safetensors(tmp_path: Path, content: bytes, words: list[str]) -> None:
    write_json(tmp_path / "config.json", GPT2)
    (tmp_path / MODEL).write_bytes(content)
    fails(CorruptFile, tmp_path, str(tmp_path / MODEL), *words)


def test_a_header_above_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, GPT2, gpt2_tensors())
    monkeypatch.setattr(safetensors_reader, "MAX_HEADER_BYTES", 100)
    fails(CorruptFile, tmp_path, MODEL, "header length", "at most 100 bytes")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("null", ["found None"]),
        ({"dtype": "Q4_K"}, ["dtype", "F32", "Q4_K"]),
        ({"dtype": None}, ["dtype", "None"]),
        ({"dtype": ["F32"]}, ["dtype", "['F32']"]),
        ({"shape": 4}, ["shape", "found 4"]),
        ({"shape": [-4]}, ["shape", "[-4]"]),
        ({"shape": [4.0]}, ["shape", "[4.0]"]),
        ({"shape": [True]}, ["shape", "[True]"]),
        ({"shape": ["4"]}, ["shape", "['4']"]),
        ({"shape": [1] * 17}, ["shape", "at most 16"]),
        ({"shape": [1 << 70]}, ["shape", str(1 << 70)]),
        ({"shape": [1 << 40]}, ["expected 4398046511104 bytes for F32", "found 16"]),  # claims terabytes
        (
            {"shape": [1 << 62, 1 << 62, 1 << 4]},
            ["expected", "bytes", "found 16"],
        ),  # would wrap to 0 in 64 bits
        ({"shape": [3]}, ["expected 12 bytes for F32 [3]", "found 16"]),
        ({"shape": [0]}, ["expected 0 bytes", "found 16"]),
        ({"data_offsets": [0, 1 << 50]}, ["data_offsets", "within the", str(1 << 50)]),
        ({"data_offsets": [-16, 0]}, ["data_offsets", "[-16, 0]"]),
        ({"data_offsets": [16, 0]}, ["data_offsets", "[16, 0]"]),
        ({"data_offsets": [0]}, ["data_offsets", "[0]"]),
        ({"data_offsets": "all"}, ["data_offsets", "all"]),
        ({"data_offsets": [0.0, 16.0]}, ["data_offsets", "[0.0, 16.0]"]),
        ({"extra": 1}, ["expected dtype, shape and data_offsets", "extra"]),
    ],
)
def test_a_header_with_wrong_offsets(tmp_path: Path, change: Any, words: list[str]) -> None:
    write_checkpoint(tmp_path, GPT2, gpt2_tensors())
    header, data = header_and_data(gpt2_tensors())
    header[NAME] = header[NAME] | change if isinstance(change, dict) else None
    (tmp_path / MODEL).write_bytes(file_bytes(header, data))
    fails(CorruptFile, tmp_path, str(tmp_path / MODEL), NAME, *words)


def test_tensors_that_overlap_or_leave_a_hole(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, GPT2, gpt2_tensors())
    header, data = header_and_data(gpt2_tensors())
    begin, end = header[NAME]["data_offsets"]
    header[NAME]["data_offsets"] = [begin - 16, end - 16]
    (tmp_path / MODEL).write_bytes(file_bytes(header, data))
    fails(CorruptFile, tmp_path, MODEL, "tensor 'transformer.h.0.", "overlaps", "expected data from offset")
    header[NAME]["data_offsets"] = [begin, end]
    first = header["transformer.wte.weight"]["data_offsets"]
    moved = {
        name: dict(entry, data_offsets=[at + 8 for at in entry["data_offsets"]])
        for name, entry in header.items()
    }
    assert first[0] == 0
    (tmp_path / MODEL).write_bytes(file_bytes(moved, bytes(8) + data))
    fails(CorruptFile, tmp_path, MODEL, "tensor 'transformer.wte.weight'", "gap", "offset 0, found 8")
    (tmp_path / MODEL).write_bytes(file_bytes(header, data + bytes(8)))
    fails(CorruptFile, tmp_path, MODEL, "bytes after the last tensor")


@pytest.mark.parametrize("cut", [1, 100, 700])
def test_a_truncated_file(tmp_path: Path, cut: int) -> None:
    write_checkpoint(tmp_path, GPT2, gpt2_tensors())
    content = (tmp_path / MODEL).read_bytes()
    (tmp_path / MODEL).write_bytes(content[:-cut])
    fails(CorruptFile, tmp_path, MODEL, "tensor", "truncated")
    (tmp_path / MODEL).write_bytes(content[:cut])
    fails(CorruptFile, tmp_path, MODEL)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, GPT2, gpt2_tensors())
    size = (tmp_path / MODEL).stat().st_size

    def shrink(done: int, total: int) -> None:
        os.truncate(tmp_path / MODEL, size - 4)

    with pytest.raises(
        CorruptFile, match=r"model\.safetensors: tensor 'transformer\.[a-z_.]*' cannot be read"
    ):
        load_checkpoint(tmp_path, dtype=np.float32, on_bytes=shrink)


# --- the tensors


@pytest.mark.parametrize("name", ["transformer.wte.weight", NAME, "transformer.h.1.mlp.c_fc.bias"])
def test_a_missing_tensor(tmp_path: Path, name: str) -> None:
    tensors = gpt2_tensors()
    del tensors[name]
    write_checkpoint(tmp_path, GPT2, tensors)
    fails(TensorMismatch, tmp_path, MODEL, f"tensor '{name}' is missing", "config.json")


def test_no_tensor_at_all(tmp_path: Path) -> None:
    fails(TensorMismatch, write_checkpoint(tmp_path, GPT2, {}), "config.json", "hold no tensors")


def test_an_untied_head_that_is_missing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**GPT2, "tie_word_embeddings": False}, gpt2_tensors())
    fails(TensorMismatch, tmp_path, MODEL, "'lm_head.weight' is missing", "[11, 4]", "config.json")


def test_a_tied_head_that_differs(tmp_path: Path) -> None:
    tensors = gpt2_tensors()
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1
    write_checkpoint(tmp_path, GPT2, tensors)
    fails(BadModelConfig, tmp_path, "config.json", "tie_word_embeddings", MODEL, "'lm_head.weight'")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("transformer.wte.weight", (12, 4), "[11, 4]"),
        ("transformer.h.0.attn.c_attn.weight", (12, 4), "[4, 12]"),
        ("transformer.h.1.mlp.c_proj.bias", (5,), "[4]"),
        (NAME, (4, 1), "[4]"),
        (NAME, (), "[4]"),
        (NAME, (0,), "[4]"),
    ],
)
def test_a_tensor_of_another_shape(tmp_path: Path, name: str, shape: tuple[int, ...], expected: str) -> None:
    tensors = gpt2_tensors()
    tensors[name] = np.zeros(shape, "f4")
    write_checkpoint(tmp_path, GPT2, tensors)
    fails(TensorMismatch, tmp_path, MODEL, f"'{name}'", f"expected shape {expected}", f"found {list(shape)}")


def test_a_part_of_a_fused_tensor_of_another_shape(tmp_path: Path) -> None:
    tensors = opt_tensors()
    name = "model.decoder.layers.1.self_attn.k_proj.weight"
    tensors[name] = np.zeros((8, 4), "f4")
    write_checkpoint(tmp_path, OPT, tensors)
    fails(TensorMismatch, tmp_path, MODEL, name, "expected shape [4, 4]", "found [8, 4]")


@pytest.mark.parametrize("dtype", ["i8", "i1"])
def test_a_tensor_of_whole_numbers(tmp_path: Path, dtype: str) -> None:
    tensors = gpt2_tensors()
    tensors[NAME] = np.zeros(4, dtype)
    write_checkpoint(tmp_path, GPT2, tensors)
    fails(TensorMismatch, tmp_path, MODEL, NAME, "expected dtype", "found I", "quantized")


@pytest.mark.parametrize(
    "name", ["transformer.h.0.adapter.weight", "score.weight", "h.0.attn.bias.x", "strange\n\x1b[31m\ud800"]
)
def test_a_tensor_too_many(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, GPT2, gpt2_tensors() | {name: np.zeros(3, "f4")})
    fails(
        TensorMismatch, tmp_path, MODEL, name[:7], "expected no such tensor", "config.json", "found F32 [3]"
    )


def test_biases_that_the_config_denies(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**OPT, "enable_bias": False}, opt_tensors())
    fails(TensorMismatch, tmp_path, MODEL, ".bias'", "expected no such tensor", "12 such tensors")


def test_more_layers_than_in_the_config(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**GPT2, "n_layer": 1}, gpt2_tensors(), n_files=2)
    fails(BadModelConfig, tmp_path, "config.json has 1 layers", "model-0000", "'transformer.h.1.", "layer 1")


# --- the index


@pytest.mark.parametrize(
    "file",
    [
        "../../etc/passwd",
        "../model.safetensors",
        "/etc/passwd",
        "/tmp/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "..",
        "",
        ".safetensors",
        "pytorch_model.bin",
        "model.safetensors\n",
        "model\0.safetensors",
        7,
        None,
        ["model.safetensors"],
    ],
)
def test_an_index_that_leads_elsewhere(tmp_path: Path, file: object) -> None:
    write_checkpoint(tmp_path / "m", GPT2, gpt2_tensors(), n_files=2)
    (tmp_path / "model.safetensors").write_bytes(b"")
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    index["weight_map"][NAME] = file
    write_json(tmp_path / "m" / INDEX, index)
    fails(CorruptFile, tmp_path / "m", INDEX, NAME, "expected the name of a .safetensors file", "found")


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_map(tmp_path: Path, weight_map: object) -> None:
    write_json(tmp_path / "config.json", GPT2)
    write_json(tmp_path / INDEX, {"weight_map": weight_map})
    fails(CorruptFile, tmp_path, INDEX, "weight_map", "expected an object")


def test_a_missing_shard(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, GPT2, gpt2_tensors(), n_files=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    fails(NotACheckpoint, tmp_path, "model-00002-of-00003.safetensors is missing", INDEX, "tensors")


def test_an_index_and_a_shard_that_disagree(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, GPT2, gpt2_tensors(), n_files=2)
    index = json.loads((tmp_path / INDEX).read_text())
    where = index["weight_map"].pop(NAME)
    write_json(tmp_path / INDEX, index)
    fails(TensorMismatch, tmp_path, where, INDEX, NAME, "None")
    index["weight_map"] |= {NAME: where, "ghost": where}
    write_json(tmp_path / INDEX, index)
    fails(TensorMismatch, tmp_path, where, INDEX, "'ghost' is missing")


# --- config.json


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (GPT2, {"n_embd": "4"}, ["n_embd", "whole number", "found 4"]),
        (GPT2, {"n_embd": 4.0}, ["n_embd", "whole number", "4.0"]),
        (GPT2, {"n_embd": True}, ["n_embd", "whole number", "True"]),
        (GPT2, {"n_embd": None}, ["n_embd", "None"]),
        (GPT2, {"n_embd": [4]}, ["n_embd", "[4]"]),
        (GPT2, {"n_embd": -4}, ["n_embd", "-4"]),
        (GPT2, {"n_embd": 0}, ["n_embd", "0"]),
        (GPT2, {"n_embd": 1 << 60}, ["n_embd", str(1 << 60)]),
        (GPT2, {"n_embd": 5}, ["n_embd 5", "multiple of n_head 2"]),
        (GPT2, {"n_layer": 10**9}, ["n_layer", "1000000000"]),
        (GPT2, {"n_inner": 0}, ["n_inner"]),
        (GPT2, {"n_positions": 10**12}, ["n_positions", "1000000000000"]),
        (GPT2, {"n_positions": None}, ["n_positions"]),
        (GPT2, {"vocab_size": 10**10}, ["vocab_size"]),
        (GPT2, {"max_position_embeddings": 7}, ["n_positions is 6", "max_position_embeddings is 7"]),
        (GPT2, {"eos_token_id": 11}, ["11", "0 to 10"]),
        (GPT2, {"eos_token_id": -1}, ["-1"]),
        (GPT2, {"eos_token_id": "end"}, ["eos_token_id", "end"]),
        (GPT2, {"eos_token_id": [[]]}, ["eos_token_id", "[[]]"]),
        (GPT2, {"bos_token_id": 99}, ["99"]),
        (GPT2, {"layer_norm_epsilon": 0}, ["layer_norm_epsilon", "0"]),
        (GPT2, {"layer_norm_epsilon": "tiny"}, ["layer_norm_epsilon", "number", "tiny"]),
        (GPT2, {"layer_norm_epsilon": 10**400}, ["layer_norm_epsilon"]),
        (GPT2, {"tie_word_embeddings": 1}, ["tie_word_embeddings", "true or false", "found 1"]),
        (GPT2, {"activation_function": 3}, ["activation_function", "text"]),
        (GPT2, {"architectures": "GPT2LMHeadModel"}, ["architectures", "list"]),
        (OPT, {"hidden_size": None}, ["hidden_size"]),
        (OPT, {"ffn_dim": 1 << 40}, ["ffn_dim", str(1 << 40)]),
        (OPT, {"word_embed_proj_dim": 0}, ["word_embed_proj_dim", "0"]),
        (OPT, {"do_layer_norm_before": "no"}, ["do_layer_norm_before", "true or false"]),
        (OPT, {"num_attention_heads": 3}, ["hidden_size 4", "multiple of num_attention_heads 3"]),
    ],
)
def test_a_config_of_absurd_values(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], words: list[str]
) -> None:
    write_json(tmp_path / "config.json", base | change)
    fails(BadModelConfig, tmp_path, str(tmp_path / "config.json"), *words)


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (GPT2, {"model_type": "wavelet"}, ["model_type", "gpt2, opt, llama", "wavelet"]),
        (GPT2, {"model_type": None}, ["model_type"]),
        (GPT2, {"model_type": "x\n" * 5000}, ["model_type", "characters"]),
        (GPT2, {"architectures": ["GPT2ForSequenceClassification"]}, ["GPT2LMHeadModel", "Classification"]),
        (GPT2, {"activation_function": "mish"}, ["activation_function", "gelu_new", "mish"]),
        (GPT2, {"scale_attn_weights": False}, ["scale_attn_weights", "expected true, found false"]),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
        (GPT2, {"add_cross_attention": True}, ["add_cross_attention"]),
        (GPT2, {"quantization_config": {"bits": 4}}, ["quantization_config"]),
        (GPT2, {"auto_map": {"AutoModel": "code.Model"}}, ["auto_map", "code of its own"]),
        (OPT, {"layer_norm_elementwise_affine": False}, ["layer_norm_elementwise_affine"]),
    ],
)
def test_a_model_that_is_not_computed(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], words: list[str]
) -> None:
    write_json(tmp_path / "config.json", base | change)
    fails(UnsupportedModel, tmp_path, str(tmp_path / "config.json"), *words)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"n_embd": NaN}', '{"a": 1, "a": 2}', "[" * 5000, '{"a":"' + "x" * 2_000_000],
    ids=lambda text: text[:16],
)
def test_a_config_that_is_not_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    fails(CorruptFile, tmp_path, str(tmp_path / "config.json"))


def test_a_number_that_is_infinite(tmp_path: Path) -> None:
    text = json.dumps(GPT2 | {"layer_norm_epsilon": 1}).replace('epsilon": 1', 'epsilon": 1e999')
    (tmp_path / "config.json").write_text(text)
    fails(BadModelConfig, tmp_path, "config.json", "layer_norm_epsilon", "number", "inf")


# --- files that disagree


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", {"model": {"vocab": {"a": 0, "b": 11}}}, ["vocab_size 11", "token id 11"]),
        (
            "tokenizer.json",
            {"model": {"vocab": {"a": 0, "b": 11}}, "added_tokens": [{"id": 40}]},
            ["vocab_size 11", "token id 11"],
        ),
        ("tokenizer.json", {"model": {"vocab": [["a", 0.0]] * 12}}, ["vocab_size 11", "token id 11"]),
    ],
)
def test_two_files_that_disagree(tmp_path: Path, file: str, content: object, words: list[str]) -> None:
    write_checkpoint(tmp_path, GPT2, gpt2_tensors())
    write_json(tmp_path / file, content)
    fails(BadModelConfig, tmp_path, str(tmp_path / "config.json"), str(tmp_path / file), *words)


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [
        ("tokenizer.json", {}, "no model.vocab"),
        ("tokenizer.json", {"model": {"vocab": {"a": "0"}}}, "token's id"),
        ("tokenizer.json", {"model": {"vocab": {}}, "added_tokens": ["x"]}, "token's id"),
    ],
)
def test_another_wrong_json_file(tmp_path: Path, file: str, content: object, word: str) -> None:
    write_json(tmp_path / "config.json", GPT2)
    write_json(tmp_path / file, content)
    with pytest.raises(BadModelConfig, match=word) as raised:
        read_config(tmp_path)
    assert file in str(raised.value)
