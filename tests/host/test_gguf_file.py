"""The header of GGUF files: every kind of value is read, and whatever is wrong is an error that names it."""

import os
import random
import resource
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orca_jax.errors import BadModelConfig, CheckpointError, CorruptFile, NotACheckpoint, UnsupportedModel
from orca_jax.families.hf_config import read_config
from orca_jax.gguf_file import GgufFile, open_gguf
from orca_jax.request.tokenizer import Tokenizer
from tests.gguf_bytes import (
    ARRAY,
    TEXT,
    U32,
    Value,
    gguf_bytes,
    small_model,
    small_tensors,
    text_bytes,
    value_bytes,
)


def written(folder: Path, data: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return path


def test_every_type_of_value(tmp_path: Path) -> None:
    limits = {
        0: 255,
        1: -128,
        2: 65535,
        3: -32768,
        4: (1 << 32) - 1,
        5: -(1 << 31),
        10: 1 << 63,
        11: -(1 << 63),
    }
    metadata: dict[str, Any] = {f"n.{kind}": Value(kind, value) for kind, value in limits.items()}
    metadata |= {"f32": Value(6, 1e-5), "f64": Value(12, 0.1), "yes": True, "no": False, "text": "né 光"}
    metadata |= {f"a.{kind}": Value(ARRAY, (kind, [value, 1])) for kind, value in limits.items()}
    metadata |= {"names": ["a", "", "光合"], "none": Value(ARRAY, (TEXT, []))}
    file = GgufFile(written(tmp_path, gguf_bytes(metadata, {})))
    for kind, value in limits.items():
        assert file.whole(f"n.{kind}") == value
        assert file.numbers(f"a.{kind}").tolist() == [value, 1]
    assert (file.number("f32"), file.number("f64")) == (1e-5, 0.1)
    assert (file.flag("yes", False), file.flag("no", True), file.flag("absent", True)) == (True, False, True)
    assert (file.text("text"), file.text("absent", "x")) == ("né 光", "x")
    assert (file.texts("names"), file.length("names"), file.texts("none")) == (["a", "", "光合"], 3, [])
    assert file.texts_at("names", [2, 0, 9]) == {2: "光合", 0: "a"}
    assert file.texts_at("names", []) == file.texts_at("absent", [0]) == {}
    assert "text" in file and "absent" not in file


def test_a_file_is_parsed_once_while_it_stays_as_it_is(tmp_path: Path) -> None:
    metadata, tensors = small_model() | {"split.no": 0, "split.count": 2}, small_tensors()
    names = [*tensors]
    first, second = (tmp_path / f"model-0000{i}-of-00002.gguf" for i in (1, 2))
    first.write_bytes(gguf_bytes(metadata, {name: tensors[name] for name in names[:4]}))

    def write_second(seed: int, n: int) -> None:
        other = small_tensors(seed=seed)
        second.write_bytes(gguf_bytes({}, {name: other[name] for name in names[4:n]}))

    write_second(0, 6)
    assert open_gguf(first) is not open_gguf(first)  # written just now: it may change again unseen
    for i, path in enumerate((first, second)):
        os.utime(path, (1000 + i, 1000 + i))
    file = open_gguf(first)
    assert open_gguf(first) is file and len(file.tensors) == 6
    write_second(1, 7)
    os.utime(second, (2000, 2000))
    assert len(open_gguf(first).tensors) == 7
    second.unlink()
    with pytest.raises(NotACheckpoint, match="00002-of-00002"):
        open_gguf(first)


@pytest.mark.parametrize(
    ("read", "key", "words"),
    [
        ("whole", "text", "a whole number, found a text"),
        ("whole", "yes", "a whole number, found true"),
        ("whole", "absent", "a whole number, found none"),
        ("number", "names", "a number, found an array of 2"),
        ("number", "nan", "a number, found nan"),
        ("text", "n", "a text, found 5"),
        ("text", "names", "a text, found an array of 2"),
        ("texts", "numbers", "an array of texts, found an array of 3"),
        ("numbers", "names", "an array of numbers, found an array of 2"),
        ("numbers", "n", "an array, found 5"),
    ],
)
def test_a_value_of_another_type(tmp_path: Path, read: str, key: str, words: str) -> None:
    metadata = {
        "text": "x",
        "yes": True,
        "names": ["a", "b"],
        "n": 5,
        "nan": float("nan"),
        "numbers": [1, 2, 3],
    }
    file = GgufFile(written(tmp_path, gguf_bytes(metadata, {})))
    with pytest.raises(BadModelConfig, match=f"model.gguf: {key}: expected {words}"):
        getattr(file, read)(key)


def head(n_tensors: int = 0, n_entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_entries)


def tensor(name: str = "a", sizes: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text_bytes(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def padded(data: bytes, more: int = 0) -> bytes:
    return data + bytes(-len(data) % 32 + more)


ENORMOUS = 1 << 63


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"", CorruptFile, "is empty"),
        (b"GG", CorruptFile, "truncated"),
        (b"safetensors", CorruptFile, "expected the bytes b'GGUF'"),
        (b"version https://git-lfs.github.com/spec/v1\n", CorruptFile, "git lfs pull"),
        (head(version=1), UnsupportedModel, "of version 1; versions 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedModel, "other byte order"),
        (head(ENORMOUS, 0), CorruptFile, "expected at most 131072 tensors"),
        (head(0, ENORMOUS), CorruptFile, "expected at most 65536 metadata entries"),
        (head(0, 3), CorruptFile, "the length of a key: expected 8 bytes"),
        (head(0, 1) + struct.pack("<Q", ENORMOUS), CorruptFile, "a key: expected at most 65536 bytes"),
        (head(0, 1) + text_bytes(b"\xff\xfe"), CorruptFile, "a key is not UTF-8"),
        (head(0, 1) + text_bytes("a\x1b[2J"), CorruptFile, "expected a printable name"),
        (
            head(0, 1) + text_bytes("k") + struct.pack("<I", 77),
            CorruptFile,
            "k: expected a type from 0 to 12",
        ),
        (
            head(0, 1) + text_bytes("k") + struct.pack("<IQ", 8, ENORMOUS),
            CorruptFile,
            f"k: expected {ENORMOUS} bytes",
        ),
        (
            head(0, 1) + text_bytes("k") + struct.pack("<IIQ", 9, 9, 1) * 20,
            CorruptFile,
            "k is an array of arrays",
        ),
        (head(0, 1) + text_bytes("k") + struct.pack("<IIQ", 9, 4, ENORMOUS), CorruptFile, "truncated"),
        (
            head(0, 1) + text_bytes("k") + struct.pack("<IIQ", 9, 8, ENORMOUS),
            CorruptFile,
            "texts, found 9223",
        ),
        (
            head(0, 1)
            + text_bytes("k")
            + struct.pack("<IIQ", 9, 8, 2)
            + text_bytes("a")
            + struct.pack("<Q", ENORMOUS),
            CorruptFile,
            "k: text 1 of 2 ends after the file does",
        ),
        (head(0, 2) + (text_bytes("k") + value_bytes(1)) * 2, CorruptFile, "the key 'k' appears twice"),
        (
            padded(head(0, 1) + text_bytes("general.alignment") + value_bytes(33)),
            CorruptFile,
            "general.alignment: expected a power of two, found 33",
        ),
        (padded(head(1) + tensor(sizes=())), CorruptFile, "tensor 'a': expected 1 to 4 axes, found 0"),
        (padded(head(1) + tensor(sizes=(32,) * 5)), CorruptFile, "expected 1 to 4 axes, found 5"),
        (padded(head(1) + tensor(sizes=(32, 0))), CorruptFile, "expected sizes above 0"),
        (padded(head(1) + tensor(sizes=(1 << 40,) * 4)), CorruptFile, "expected sizes above 0"),
        (padded(head(1) + tensor(sizes=(ENORMOUS,))), CorruptFile, "expected sizes above 0"),
        (
            padded(head(1) + tensor(sizes=(48,), kind=8), 999),
            CorruptFile,
            "the first a multiple of 32, found .48",
        ),
        (padded(head(1) + tensor(kind=99), 128), CorruptFile, "the type 99 is not known"),
        (
            padded(head(1) + tensor(kind=16), 128),
            UnsupportedModel,
            "'a' is of the type IQ2_XXS; expected one of F32",
        ),
        (
            padded(head(1) + tensor(), 127),
            CorruptFile,
            "'a': expected 128 bytes within the 127 bytes of data",
        ),
        (padded(head(1) + tensor(offset=1 << 62), 128), CorruptFile, "found them at 4611686018427387904"),
        (padded(head(1) + tensor(offset=16), 256), CorruptFile, "a multiple of 32"),
        (padded(head(2) + tensor("a") + tensor("b", offset=96), 256), CorruptFile, "'b'.*not before 128"),
        (
            padded(head(2) + tensor("a") + tensor("a", offset=128), 256),
            CorruptFile,
            "tensor 'a' appears twice",
        ),
    ],
)
def test_a_hostile_header_is_named_at_once(
    tmp_path: Path, data: bytes, error: type[CheckpointError], words: str
) -> None:
    path = written(tmp_path, data)
    with pytest.raises(error, match=words) as raised:
        GgufFile(path)
    assert str(path) in str(raised.value) and str(raised.value).isprintable()


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match="cannot be read"):
        GgufFile(tmp_path / "absent.gguf")
    with pytest.raises(NotACheckpoint):
        GgufFile(tmp_path)


def _whole_file() -> bytes:
    words = ["<unk>", "<s>", "</s>", *(chr(97 + i) for i in range(26)), "ab", "abc"]
    tokenizer = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(words))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * (len(words) - 3)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }
    return gguf_bytes(small_model() | tokenizer, small_tensors("Q4_0"))


def test_damaged_files_are_refused_or_read(tmp_path: Path) -> None:
    """Random changes and cuts of a header: a CheckpointError or a model, soon and in little memory."""
    right = _whole_file()
    n_head = right.index(b"output_norm.weight") + 60
    assert read_config(written(tmp_path, right)).vocab_size == 96
    dice, before = random.Random(7), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for _ in range(400):
        data = bytearray(right)
        for _ in range(dice.choice((1, 1, 2, 8))):
            at = dice.randrange(min(n_head, len(data)))
            kind = dice.randrange(4)
            if kind == 0:
                data[at] = dice.randrange(256)
            elif kind == 1:
                data[at : at + 8] = struct.pack(
                    "<Q", dice.choice((0, 1, 255, 1 << 31, ENORMOUS, (1 << 64) - 1))
                )
            elif kind == 2:
                del data[at : at + dice.randrange(1, 64)]
            else:
                data = data[: dice.randrange(len(data))] + bytes(1)
        path = written(tmp_path, bytes(data))
        start = time.process_time()
        try:
            read_config(path)
            Tokenizer.from_file(path)
        except CheckpointError:
            refused += 1
        assert time.process_time() - start < 1
    assert refused > 200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_numbers_are_those_of_the_file(tmp_path: Path) -> None:
    values = np.array([1, -2, 3], np.int32)
    file = GgufFile(
        written(tmp_path, gguf_bytes({"a": Value(ARRAY, (5, values.tolist())), "u": Value(U32, 7)}, {}))
    )
    np.testing.assert_array_equal(file.numbers("a"), values)
    assert file.numbers("absent").size == 0
