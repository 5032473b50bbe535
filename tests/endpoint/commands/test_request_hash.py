"""The hashes of requests and models: equal where the answer is the same, different where it may not be."""

import json
from pathlib import Path
from typing import Any

import pytest

from orca_jax.request.sampling_params import SamplingParams
from server.commands.request_lines import Line, model_hash, request_hash

FLAGS = SamplingParams(max_tokens=128, temperature=0.8, stop=("x",))


def hashed(values: dict[str, Any] | bytes, flags: SamplingParams = FLAGS) -> str:
    data = values if isinstance(values, bytes) else json.dumps(values).encode()
    line = Line(1, len(data), data)
    return request_hash(line, None if isinstance(values, bytes) else values, flags)


SAME: list[tuple[dict[str, Any], SamplingParams]] = [
    ({"prompt": "a", "max_tokens": 128}, FLAGS),
    ({"max_tokens": 128, "prompt": "a"}, FLAGS),
    ({"prompt": "a", "stop": ["x"], "temperature": 0.8, "max_tokens": 128}, SamplingParams()),
    ({"prompt": "a", "top_p": 1.0}, FLAGS),
]


@pytest.mark.parametrize(("values", "flags"), SAME, ids=range(len(SAME)))
def test_spelling_and_place_of_a_parameter_do_not_matter(
    values: dict[str, Any], flags: SamplingParams
) -> None:
    assert hashed(values, flags) == hashed({"prompt": "a"})


DIFFERENT: list[tuple[dict[str, Any], SamplingParams]] = [
    ({"prompt": "b"}, FLAGS),
    ({"prompt": [97]}, FLAGS),
    ({"prompt": "a", "max_tokens": 127}, FLAGS),
    ({"prompt": "a", "seed": 0}, FLAGS),
    ({"prompt": "a", "ignore_eos": 0}, FLAGS),  # an error, where false is none
    ({"prompt": "a", "no_such_field": 1}, FLAGS),
    ({"prompt": "a"}, SamplingParams(max_tokens=128, temperature=0.8)),
    ({"prompt": "a"}, SamplingParams(max_tokens=128, temperature=0.8, stop=("x",), seed=3)),
    ({"prompt": "a", "use_beam_search": True}, FLAGS),
]


def test_each_difference_makes_another_hash() -> None:
    hashes = [hashed({"prompt": "a"}), *(hashed(values, flags) for values, flags in DIFFERENT)]
    hashes += [hashed(b"not json"), hashed(b"not json either"), hashed(b'{"prompt": "a"}')]
    assert len(set(hashes)) == len(hashes)


def test_a_lone_surrogate_and_infinity_are_hashed() -> None:
    assert hashed({"prompt": "\ud800"}) != hashed({"prompt": "\ud801"})
    assert hashed({"prompt": "a", "temperature": float("inf")}) != hashed({"prompt": "a"})


def make(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(3 << 20))
    return directory


def test_a_model_is_known_by_its_files_and_settings_wherever_it_is(tmp_path: Path) -> None:
    here, there = make(tmp_path / "here"), make(tmp_path / "there")
    settings = {"dtype": "float32"}
    same = model_hash(here, here, settings)
    assert model_hash(there, here, settings) == model_hash(here, there, settings) == same
    (here / "README.md").write_text("changes nothing")
    (here / "answers.jsonl").write_text("changes nothing")
    (here / "cache").mkdir()
    (here / "cache" / "file").write_text("changes nothing")
    assert model_hash(here, here, settings) == same
    seen = [same, model_hash(here, here, {"dtype": "bfloat16"}), model_hash(here, None, settings)]
    seen += [model_hash(None, None, settings), model_hash(None, here, settings)]
    for name, data in (
        ("config.json", b"{ }"),
        ("tokenizer.json", b"{ }"),
        ("chat_template.jinja", b"x"),
        ("additional_chat_templates/tool_use.jinja", b"x"),
        ("model.safetensors", bytes((3 << 20) - 1) + b"1"),
        ("model.safetensors", b"1" + bytes((3 << 20) - 1)),
        ("model.safetensors", bytes((3 << 20) + 1)),
        ("model-2.safetensors", b""),
    ):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_bytes(data)
        seen.append(model_hash(here, here, settings))
        assert seen[-1] not in seen[:-1], name
    (there / "config.json").unlink()
    assert model_hash(here, there, settings) != model_hash(there, here, settings)


def test_weights_in_folders_count_where_there_are_no_safetensors(tmp_path: Path) -> None:
    (tmp_path / "ckpt" / "d").mkdir(parents=True)
    for name in ("ckpt/d/shard", "ckpt/shard"):
        (tmp_path / name).write_bytes(b"1")
        before = model_hash(tmp_path, None, {})
        (tmp_path / name).write_bytes(b"2")
        assert model_hash(tmp_path, None, {}) != before, name
