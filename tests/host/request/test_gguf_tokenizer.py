"""Tokenizers of GGUF files: the same tokens as the tokenizer.json that a file was made from."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.errors import (
    BadModelConfig,
    CheckpointError,
    CorruptFile,
    InvalidRequest,
    UnsupportedModel,
)
from orca_jax.gguf_file import GgufFile
from orca_jax.model_files.found_model import find_model
from orca_jax.request.chat.template_files import load_chat_template
from orca_jax.request.generation_defaults import NO_DEFAULTS
from orca_jax.request.gguf_tokenizer import gguf_tokenizer
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.request.tokenizer_config import read_tokenizer_config
from tests.gguf_bytes import ARRAY, Tensor, Value, gguf_bytes, small_model, small_tensors
from tests.host.request.family_tokenizers import CORPUS, FAMILIES, SPACE
from tests.places import DATA

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
# Each family's pre-tokenizer, and whether a text begins with a token.
BYTE_LEVEL = {
    "llama 3": "llama-bpe",
    "qwen": "qwen2",
    "granite": "gpt-2",
    "olmo2": "dbrx",
    "starcoder2": "starcoder",
}
SENTENCE_PIECE = ("llama 1 and 2", "mistral", "gemma")
UNIGRAM = ("t5",)


def metadata_of(source: tokenizers.Tokenizer, pre: str = "") -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes for a tokenizer.json; `pre` names its pre-tokenizer."""
    values = json.loads(source.to_str())
    added = {token["content"]: token for token in values["added_tokens"]}
    vocabulary = values["model"]["vocab"]
    is_unigram = values["model"]["type"] == "Unigram"
    if is_unigram:
        vocabulary = {name: i for i, (name, _) in enumerate(vocabulary)}
    ids: dict[str, int] = vocabulary | {name: token["id"] for name, token in added.items()}
    tokens = sorted(ids, key=ids.__getitem__)
    starts = (values["post_processor"] or {}).get("processors", [values["post_processor"]])[-1] or {}
    start = next(iter(starts.get("special_tokens", {})), None)
    found = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_type(name, added, pre) for name in tokens],
    }
    if start is not None:
        found["tokenizer.ggml.bos_token_id"] = ids[start]
    found["tokenizer.ggml.add_bos_token"] = start is not None
    if is_unigram:
        scores = dict(values["model"]["vocab"])
        return found | {
            "tokenizer.ggml.model": "t5",
            "tokenizer.ggml.scores": [scores.get(name, -1e4) for name in tokens],
            "tokenizer.ggml.unknown_token_id": ids["<unk>"],
            "tokenizer.ggml.remove_extra_whitespaces": False,
            "tokenizer.ggml.add_eos_token": False,
        }
    merges = values["model"]["merges"]
    if pre:
        pairs = [" ".join(pair) for pair in merges]
        return found | {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.merges": pairs,
        }
    ranks = {"".join(pair): float(-rank) for rank, pair in reversed([*enumerate(merges)])}
    scores = [ranks.get(name, -1e4) for name in tokens]
    prefix = "Prepend" in json.dumps(values["normalizer"])
    return found | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.unknown_token_id": ids["<unk>"],
    }


def _type(name: str, added: Mapping[str, Any], pre: str) -> int:
    if name == "<unk>" and not pre:
        return _UNKNOWN
    if name in added:
        return _CONTROL if added[name]["special"] else _USER_DEFINED
    return _BYTE if not pre and len(name) == 6 and name.startswith("<0x") else _NORMAL


def made(folder: Path, metadata: Mapping[str, Any], n_rows: int = 96) -> Path:
    """A file with this tokenizer, and a model that has an embedding of `n_rows` tokens."""
    tensors = small_tensors("Q8_0")
    tensors["token_embd.weight"] = Tensor("F16", (n_rows, 256), bytes(n_rows * 512))
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes(small_model() | dict(metadata), tensors))
    return path


def _as_published(source: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same with a Unigram model's scores in float32, as SentencePiece has them."""
    values = json.loads(source.to_str())
    if values["model"]["type"] == "Unigram":
        values["model"]["vocab"] = [(name, float(np.float32(x))) for name, x in values["model"]["vocab"]]
    return tokenizers.Tokenizer.from_str(json.dumps(values))


LIBRARIES = {name: _as_published(FAMILIES[name]()) for name in (*BYTE_LEVEL, *SENTENCE_PIECE, *UNIGRAM)}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("files")
    return {
        name: Tokenizer.from_file(made(folder, metadata_of(library, BYTE_LEVEL.get(name, ""))))
        for name, library in LIBRARIES.items()
    }


texts = st.one_of(
    st.text(max_size=40),
    st.text(" \n\t" + SPACE + "aé中👩1'sthe<>", max_size=20),
    st.sampled_from(CORPUS),
    st.sampled_from(
        ["<s>x</s> y", "<|im_start|>user\n1<|im_end|>", "[INST] a [/INST]", "<think> \n</think>", "<bos>a"]
    ),
)


@settings(max_examples=300)
@given(st.sampled_from([*LIBRARIES]), texts)
def test_the_same_tokens_and_texts(built: dict[str, Tokenizer], name: str, text: str) -> None:
    library = LIBRARIES[name]
    expected = library.encode(text, add_special_tokens=False).ids
    assert built[name].encode(text, add_special_tokens=False) == expected
    assert built[name].decode(expected) == library.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_text_begins_as_the_original_has_it(built: dict[str, Tokenizer], name: str) -> None:
    assert built[name].encode("In the beginning") == LIBRARIES[name].encode("In the beginning").ids
    special = {name for name, token in _added(name).items() if token["special"]}
    assert {each for _, each in built[name].special_names()} >= special


def _added(name: str) -> dict[str, Any]:
    return {token["content"]: token for token in json.loads(LIBRARIES[name].to_str())["added_tokens"]}


def test_unigram_tokens_are_those_of_sentencepiece(tmp_path: Path) -> None:
    """With its table of normalization, as scripts/golden/unigram.py wrote them."""
    model = json.loads((DATA / "golden" / "unigram.json").read_text())
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": model["pieces"],
        "tokenizer.ggml.scores": model["scores"],
        "tokenizer.ggml.token_type": model["types"],
        "tokenizer.ggml.precompiled_charsmap": Value(ARRAY, (0, model["charsmap"])),
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 2,
    }
    tokenizer = Tokenizer.from_file(made(tmp_path, metadata, n_rows=len(model["pieces"])))
    for row in model["texts"]:
        assert tokenizer.encode(row["text"]) == row["ids"], row["text"]
    text = model["texts"][0]
    assert tokenizer.decode(text["ids"]) == text["text"]


pieces = st.lists(st.text("aé👩", min_size=1, max_size=4), min_size=1, max_size=40)


@settings(max_examples=200)
@given(pieces, st.data())
def test_pieces_merge_in_the_order_of_their_scores(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], data: st.DataObject
) -> None:
    """Each piece of two others that are not special, the best score first, then by the ids of all three."""
    tokens = ["<unk>", *texts]
    n = len(tokens)
    scores = data.draw(st.lists(st.sampled_from([-3.0, -1.0, 0.0, 2.5]), min_size=n, max_size=n))
    kinds = st.sampled_from([_NORMAL, _NORMAL, _NORMAL, _USER_DEFINED, _CONTROL, _BYTE])
    types = [_UNKNOWN, *data.draw(st.lists(kinds, min_size=n - 1, max_size=n - 1))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
    }
    ids = {text: i for i, text in reversed([*enumerate(tokens)])}
    plain = {text for text, i in ids.items() if types[i] in (_NORMAL, _USER_DEFINED)}
    expected = [
        (-scores[ids[text]], ids[text], ids[text[:at]], ids[text[at:]], text[:at], text[at:])
        for text in plain
        for at in range(1, len(text))
        if text[:at] in plain and text[at:] in plain
    ]
    path = tmp_path_factory.getbasetemp() / "tokenizer.gguf"
    path.write_bytes(gguf_bytes(metadata, {}))
    merges = json.loads(gguf_tokenizer(GgufFile(path)).to_str())["model"]["merges"]
    assert [tuple(pair) for pair in merges] == [each[4:] for each in sorted(expected)]


def test_templates_and_special_tokens(tmp_path: Path) -> None:
    metadata = metadata_of(LIBRARIES["qwen"], "qwen2") | {
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 1,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}",
        "tokenizer.chat_template.rag": "rag{{ eos_token }}",
        "tokenizer.chat_templates": ["rag"],
    }
    path = made(tmp_path, metadata, n_rows=512)
    tokens = read_tokenizer_config(path).special_tokens
    assert tokens == {"eos_token": "<|im_end|>"}
    templates = load_chat_template(path, None)
    assert templates is not None
    assert templates.choose(None, has_tools=False).render([{"role": "user", "content": "x"}]) == "[x]"
    assert (
        templates.choose("rag", has_tools=False).render([{"role": "user", "content": "x"}]) == "rag<|im_end|>"
    )
    found = find_model(path, "auto")
    assert found.tokenizer is not None and found.text_directory == path
    assert found.config.eos_token_ids == (2, 1)


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    for metadata in ({}, {"tokenizer.ggml.model": "none"}):
        assert find_model(made(tmp_path, metadata), "auto").tokenizer is None


GOOD = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"],
}


def test_another_tokenizer_in_place_of_one_that_is_not_read(tmp_path: Path) -> None:
    path = made(tmp_path, GOOD | {"tokenizer.ggml.pre": "unheard-of", "tokenizer.ggml.eos_token_id": 2})
    (tmp_path / "other").mkdir()
    gguf_tokenizer(GgufFile(made(tmp_path / "other", GOOD))).save(str(tmp_path / "tokenizer.json"))
    found = find_model(path, "auto", "auto", tmp_path / "tokenizer.json")
    assert found.tokenizer is not None and found.tokenizer.encode("ab") == [2]
    assert found.config.eos_token_ids == (2,)


def test_a_template_that_does_not_end(tmp_path: Path) -> None:
    source = "{% for i in range(1000000) %}{% for j in range(1000000) %}{{ i }}{% endfor %}{% endfor %}"
    templates = load_chat_template(made(tmp_path, GOOD | {"tokenizer.chat_template": source}), None)
    assert templates is not None
    with pytest.raises(InvalidRequest):
        templates.choose(None, has_tools=False).render([{"role": "user", "content": "x"}])


def test_the_samplers_that_a_file_recommends(tmp_path: Path) -> None:
    sampling = {"temp": 0.5, "top_k": 40, "top_p": 0.75, "mirostat": 2}
    metadata = {f"general.sampling.{name}": value for name, value in sampling.items()}
    generation = find_model(made(tmp_path, metadata), "auto", "auto").generation
    assert generation.sampling == {"temperature": 0.5, "top_k": 40, "top_p": 0.75}
    assert generation.ignored == ("general.sampling.mirostat",)
    assert find_model(made(tmp_path, metadata), "auto", "none").generation == NO_DEFAULTS
    with pytest.raises(BadModelConfig, match=r"model.gguf.*top_p.*--generation-config none"):
        find_model(made(tmp_path, metadata | {"general.sampling.top_p": 7.0}), "auto", "auto")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": "rwkv"}, UnsupportedModel, "ggml.model: expected one of gpt2, llama, t5, found 'rwkv'"),
        ({"pre": "unheard-of"}, UnsupportedModel, r"ggml.pre: expected one of gpt-2, .*found 'unheard-of'"),
        ({"tokens": ["a" * 2000]}, CorruptFile, "at most 1024 characters in each, found 2000"),
        ({"tokens": 5}, BadModelConfig, "ggml.tokens: expected an array, found 5"),
        ({"tokens": [1, 2]}, BadModelConfig, "ggml.tokens: expected an array of texts"),
        (
            {"token_type": [1]},
            BadModelConfig,
            "ggml.token_type: expected 3 numbers, one for each token, found 1",
        ),
        ({"merges": ["a x"]}, CorruptFile, "no valid tokenizer"),
        ({"merges": ["ab"]}, CorruptFile, "no valid tokenizer"),
        ({"model": "llama"}, BadModelConfig, "ggml.scores: expected a score for each token"),
        ({"tokens": [str(i) for i in range(97)]}, BadModelConfig, "has 96 rows, .* has 97 tokens"),
    ],
)
def test_a_wrong_tokenizer(
    tmp_path: Path, changes: dict[str, Any], error: type[CheckpointError], words: str
) -> None:
    assert gguf_tokenizer(GgufFile(made(tmp_path, GOOD))).encode("ab").ids == [2]
    path = made(tmp_path, GOOD | {f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    with pytest.raises(error, match=words) as raised:
        find_model(path, "auto")
    assert str(path) in str(raised.value)
