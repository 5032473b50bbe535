"""The config.json of popular checkpoints as published: public facts, and the fields that are not used."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from orca_jax.families.hf_config import HFConfig, hf_config_of, read_hf_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import parameter_shapes
from tests.host.families.published_checkpoints import PUBLISHED, Published

SAVED_AGAIN = json.loads((Path(__file__).parent / "data" / "saved_again.json").read_text())


def read(tmp_path: Path, published: Published) -> HFConfig:
    (tmp_path / "config.json").write_text(json.dumps(published.config))
    return read_hf_config(tmp_path)


def shape_of(model: ModelConfig) -> tuple[int, ...]:
    return (
        *(model.n_layers, model.hidden_size, model.n_heads, model.n_kv_heads, model.head_size),
        *(model.feed_forward.size, model.vocab_size, model.n_positions),
    )


def count_of(model: ModelConfig) -> int:
    """The number of weights as publications count them.

    A bias table that all layers share (T5) counts once for each side, and BART's bias of the logits, a buffer
    of zeros, not at all.
    """
    relative = model.attention.scores.relative
    again = re.compile(
        r"(encoder\.)?layers\.[1-9]\d*\.relative_bias" if relative and relative.shared else "head.bias"
    )
    shapes = parameter_shapes(model)
    return sum(math.prod(shape) for name, shape in shapes.items() if not again.fullmatch(name))


def windows_of(model: ModelConfig) -> tuple[int, int]:
    found = [attention.scores.window for attention in model.attentions]
    sizes = [window for window in found if window is not None]
    assert len(set(sizes)) <= 1
    return len(sizes), sizes[0] if sizes else 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_unchanged(tmp_path: Path, name: str) -> None:
    published = PUBLISHED[name]
    found = read(tmp_path, published)
    model = found.model
    assert shape_of(model) == published.shape
    assert windows_of(model) == published.windows
    assert model.embedding.tied is published.tied
    assert model.eos_token_ids == published.eos
    assert sorted(found.unread) == sorted(published.unread)
    rotaries = [attention.rotary for attention in model.attentions if attention.scores.window is None]
    full = (rotaries or [model.attention.rotary])[0]
    assert (None if full is None else full.base) == published.base
    scaling = None if full is None else full.scaling
    assert (None if scaling is None else scaling.kind) == published.scaling
    if published.parameters is not None:
        assert count_of(model) == published.parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_written_config_reads_as_the_same_model(tmp_path: Path, name: str) -> None:
    model = read(tmp_path, PUBLISHED[name]).model
    (tmp_path / "config.json").write_text(json.dumps(hf_config_of(model)))
    assert read_hf_config(tmp_path).model == model.with_forms({})


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_that_transformers_saved_again_is_the_same_model(tmp_path: Path, name: str) -> None:
    """A fine-tune's config.json: transformers 5 reads the published one and writes its own spelling."""
    first = read(tmp_path, PUBLISHED[name]).model
    (tmp_path / "config.json").write_text(json.dumps(SAVED_AGAIN[name]))
    again = read_hf_config(tmp_path).model
    stated = "bos_token_id" in PUBLISHED[name].config  # transformers fills in its class's default
    assert again == (first if stated else replace(first, bos_token_id=again.bos_token_id))


def test_there_are_sixty_of_every_family_that_is_much_used() -> None:
    assert len(PUBLISHED) >= 60
    families = {published.config["model_type"] for published in PUBLISHED.values()}
    assert {"llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt_oss", "deepseek_v3", "t5"} <= families
