"""generation_config.json: recommended sampling parameters and end-of-sequence tokens."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from orca_jax import SamplingParams
from orca_jax.errors import BadModelConfig, ConfigError, CorruptFile
from orca_jax.model_files.found_model import find_model, read_generation_defaults
from orca_jax.request.generation_defaults import NO_DEFAULTS
from orca_jax.request.token_text import BYTE_OF_CHARACTER
from tests.device.checkpoint.tiny_checkpoint import GPT2, write_json

LLAMA = {
    "bos_token_id": 128000,
    "do_sample": True,
    "eos_token_id": [128001, 128008, 128009],
    "temperature": 0.6,
    "top_p": 0.9,
    "transformers_version": "4.42.3",
}


def written(directory: Path, values: Any) -> Path:
    write_json(directory / "generation_config.json", values)
    return directory


def test_the_models_recommendations_become_defaults(tmp_path: Path) -> None:
    defaults = read_generation_defaults(written(tmp_path, LLAMA), "auto")
    assert defaults.sampling_params() == SamplingParams(temperature=0.6, top_p=0.9)
    assert defaults.eos_token_ids == (128001, 128008, 128009)
    assert str(defaults) == f"temperature 0.6, top_p 0.9 ({tmp_path / 'generation_config.json'})"


@pytest.mark.parametrize(
    ("values", "sampling"),
    [
        ({}, SamplingParams()),
        ({"temperature": None, "top_k": None, "do_sample": None}, SamplingParams()),
        (
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05},
            SamplingParams(temperature=0.7, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.05),
        ),
        ({"do_sample": False, "temperature": 0.7}, SamplingParams(temperature=0.0)),
        ({"max_new_tokens": 2048, "max_length": 20}, SamplingParams(max_tokens=2048)),
    ],
)
def test_fields_become_sampling_parameters(tmp_path: Path, values: Any, sampling: SamplingParams) -> None:
    assert read_generation_defaults(written(tmp_path, values), "auto").sampling_params() == sampling


def test_ignored_parameters_are_named(tmp_path: Path) -> None:
    values = {
        "num_beams": 4,
        "typical_p": 1.0,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [],
        "max_length": 9,
    }
    defaults = read_generation_defaults(written(tmp_path, values), "auto")
    assert defaults.ignored == ("num_beams", "no_repeat_ngram_size")
    assert str(defaults).endswith("generation_config.json; not applied: num_beams, no_repeat_ngram_size)")
    assert str(defaults).startswith("none (")


def test_where_it_is_read(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    other.mkdir()
    assert read_generation_defaults(mine, "auto") == read_generation_defaults(None, "auto") == NO_DEFAULTS
    written(mine, {"top_k": 5})
    written(other, {"top_k": 7})
    assert read_generation_defaults(mine, "auto").sampling == {"top_k": 5}
    assert read_generation_defaults(mine, "none") == NO_DEFAULTS
    assert str(NO_DEFAULTS) == ""
    for directory in (mine, None):
        assert read_generation_defaults(directory, str(other)).sampling == {"top_k": 7}
    with pytest.raises(ConfigError, match=r"nowhere; it must be auto, none, or a directory with generation_"):
        read_generation_defaults(mine, str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 1000}, "temperature is 1000; it must be .*--generation-config none"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"do_sample": 1}, "do_sample: expected true or false"),
        ({"eos_token_id": "x"}, "eos_token_id"),
    ],
)
def test_a_bad_value_is_named(tmp_path: Path, values: Any, message: str) -> None:
    with pytest.raises(BadModelConfig, match=message) as caught:
        read_generation_defaults(written(tmp_path, values), "auto")
    assert str(tmp_path / "generation_config.json") in str(caught.value)


def test_a_malformed_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[1")
    with pytest.raises(CorruptFile, match=r"generation_config\.json"):
        read_generation_defaults(tmp_path, "auto")
    assert read_generation_defaults(tmp_path, "none") == NO_DEFAULTS


def checkpoint(directory: Path) -> Path:
    """A GPT-2 of 300 tokens: bytes, and special tokens from 256 on."""
    write_json(directory / "config.json", {**GPT2, "vocab_size": 300})
    library = tokenizers.Tokenizer(models.BPE(BYTE_OF_CHARACTER, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<end>", "<turn>", "<call>"])
    library.save(str(directory / "tokenizer.json"))
    return directory


def test_every_end_of_sequence_token_counts(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path)
    assert find_model(directory, "auto", "auto").config.eos_token_ids == (10,)
    write_json(directory / "tokenizer_config.json", {"eos_token": {"content": "<turn>"}})
    assert find_model(directory, "auto", "auto").config.eos_token_ids == (10, 257)
    written(directory, {"eos_token_id": [256, 10, 257], "bos_token_id": 9})
    assert find_model(directory, "auto", "auto").config.eos_token_ids == (10, 256, 257)
    assert find_model(directory, "auto", "none").config.eos_token_ids == (10, 257)
    write_json(directory / "tokenizer_config.json", {"eos_token": "<no such token>"})
    assert find_model(directory, "auto", "none").config.eos_token_ids == (10,)


def test_an_end_of_sequence_token_outside_the_vocabulary(tmp_path: Path) -> None:
    written(checkpoint(tmp_path), {"eos_token_id": [10, 300]})
    with pytest.raises(BadModelConfig, match=r"generation_config\.json does not fit .*vocab_size 300.* 300"):
        find_model(tmp_path, "auto", "auto")
