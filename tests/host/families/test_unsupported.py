"""Errors for checkpoints that no family reads."""

import json
from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import UnsupportedModel
from orca_jax.families.hf_config import hf_config_of, read_config
from orca_jax.families.presets import PRESETS
from orca_jax.families.registry import FAMILIES
from orca_jax.families.unsupported import about_model_type


def message(folder: Path, **fields: Any) -> str:
    """The error about a Llama's config.json with these fields."""
    values = hf_config_of(PRESETS["llama-3.1-8b"]) | fields
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(UnsupportedModel) as raised:
        read_config(folder)
    text = str(raised.value)
    assert text.isprintable() and len(text) < 1000
    return text


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("llava", "found 'llava', a model of images and text"),
        ("qwen2_vl", "a model of images and text"),
        ("albert", "found 'albert', an encoder, and only BERT, RoBERTa, XLM-RoBERTa and ModernBERT"),
        ("eurobert", "an encoder"),
        ("clip", "a model of images; language models are served here"),
        ("whisper", "a model of speech or sound"),
        ("mamba", "recurrent layers"),
        ("qwen2_5", "found 'qwen2_5'; the closest of these is qwen2"),
        ("unheard_of", "found 'unheard_of'"),
    ],
)
def test_another_kind_of_model(tmp_path: Path, model_type: str, words: str) -> None:
    text = message(tmp_path, model_type=model_type)
    assert "expected one of gpt2, opt, llama," in text and words in text
    assert text.endswith("'") is (model_type == "unheard_of")


def test_a_vision_models_text_part_is_named(tmp_path: Path) -> None:
    text = message(tmp_path, model_type="llava", text_config={"model_type": "llama"})
    assert text.endswith("; its text part is a llama")
    assert about_model_type("llava", {"text_config": 3}, FAMILIES).endswith("served here")


def test_no_family_is_called_unsupported() -> None:
    assert not [name for name in FAMILIES if about_model_type(name, {}, ()) != ""]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (
            {"quant_method": "auto-round", "bits": 4},
            "quantised by AutoRound in 4 bits (quant_method auto-round)",
        ),
        ({"quant_method": "aqlm", "bits": 2}, "quantised by AQLM in 2 bits"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised by bitsandbytes (quant_method"),
        ({"quant_method": "mxfp4"}, "Mxfp4Config(dequantize=True)"),
        ({"quant_method": "new"}, "quantised by new (quant_method new)"),
        ({"bits": 4}, "a method that it does not name in 4 bits"),
        ({"quant_method": ["x"]}, "a method that it does not name"),
    ],
)
def test_quantised_weights_are_refused_with_advice(
    tmp_path: Path, section: dict[str, Any], words: str
) -> None:
    text = message(tmp_path, quantization_config=section)
    assert words in text and "Use the model with its original weights" in text
