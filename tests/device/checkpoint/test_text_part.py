"""A model of text and pictures loads its text part, under each prefix that its tensors may have."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.errors import BadModelConfig, TensorMismatch, UnsupportedModel
from orca_jax.families.hf_config import read_hf_config

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "gemma3-linear"
TEXT = json.loads((GOLDEN / "config.json").read_text())
VISION = {
    "vision_tower.vision_model.embeddings.patch_embedding.bias": np.ones(4, np.float32),
    "multi_modal_projector.mm_input_projection_weight": np.ones((4, 2), np.float32),
}
WHOLE: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "mm_tokens_per_image": 4,
    "image_token_index": 7,
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 4},
    "text_config": TEXT,
}


def write(
    directory: Path, prefix: str, *, outer: str = "", head: str = "lm_head.weight", **changes: Any
) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(WHOLE | changes))
    tensors = {
        head if name == "lm_head.weight" else name.replace("model.", prefix, 1): tensor
        for name, tensor in load_file(GOLDEN / "model.safetensors").items()
    }
    vision = {f"{outer}{name}": tensor for name, tensor in VISION.items()}
    save_file(tensors | vision, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("prefix", "outer"), [("language_model.model.", ""), ("model.language_model.", "model."), ("model.", "")]
)
def test_the_text_part_of_gemma3_is_the_text_model(tmp_path: Path, prefix: str, outer: str) -> None:
    loaded = load_checkpoint(write(tmp_path, prefix, outer=outer), dtype=np.float32)
    alone = load_checkpoint(GOLDEN, dtype=np.float32)
    assert loaded.config == alone.config
    assert loaded.parameters.keys() == alone.parameters.keys()
    for name, array in loaded.parameters.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(alone.parameters[name]))


def test_a_separate_head_is_found_under_both_names(tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / "model.safetensors")
    head = np.ascontiguousarray(tensors["model.embed_tokens.weight"][::-1])
    for i, name in enumerate(("lm_head.weight", "language_model.lm_head.weight")):
        directory = write(tmp_path / str(i), "language_model.model.", head=name, tie_word_embeddings=False)
        stored = load_file(directory / "model.safetensors")
        save_file(stored | {name: head}, directory / "model.safetensors")
        loaded = load_checkpoint(directory, dtype=np.float32)
        np.testing.assert_array_equal(np.asarray(loaded.parameters["head.weight"]), head)


def test_omitted_parts_are_named(tmp_path: Path) -> None:
    note = read_hf_config(write(tmp_path, "model.language_model.", outer="model.")).note
    assert "its text part is served" in note
    assert "not used: image_token_index, mm_tokens_per_image, vision_config" in note


def test_a_tensor_of_no_known_part_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, "language_model.model.")
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"audio_tower.weight": np.ones(2, np.float32)}, directory / "model.safetensors")
    with pytest.raises(TensorMismatch, match=r"audio_tower\.weight"):
        load_checkpoint(directory, dtype=np.float32)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"text_config": None}, BadModelConfig, "text_config: expected an object"),
        (
            {"text_config": TEXT | {"model_type": "llama"}},
            UnsupportedModel,
            "expected one of gemma3_text, found 'llama'",
        ),
        ({"text_config": TEXT | {"odd_scale": 2}}, UnsupportedModel, "text_config.odd_scale is 2"),
        (
            {"text_config": TEXT | {"quantization_config": {"bits": 4}}},
            UnsupportedModel,
            "quantization_config",
        ),
        ({"odd_scale": 2}, UnsupportedModel, "odd_scale is 2"),
    ],
)
def test_unsupported_models_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WHOLE | changes))
    with pytest.raises(error, match=words):
        read_hf_config(tmp_path)
