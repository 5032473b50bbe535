"""Valid checkpoints: every layout, dtype and option becomes the expected parameters."""

import json
import os
import re
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub.utils import filter_repo_objects

from orca_jax.checkpoint import safetensors_reader as safetensors_file
from orca_jax.checkpoint.directory import Checkpoint, load_checkpoint
from orca_jax.errors import BadModelConfig, ConfigError, NotACheckpoint, TensorMismatch
from orca_jax.families.hf_config import read_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import parameter_shapes
from orca_jax.model_files.locate import find_directory
from orca_jax.model_files.weight_files import INDEX
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
from tests.gpt_config import gpt_config


def expected(config: ModelConfig, tensors: Tensors) -> dict[str, np.ndarray]:
    """The parameters of tensors without prefix, written out by hand where they differ."""
    parameters: dict[str, np.ndarray] = {}
    gpt2 = "wte.weight" in tensors
    for name in parameter_shapes(config):
        if gpt2:
            theirs = name.replace("layers.", "h.").replace(".scale", ".weight")
            for ours, other in (
                ("token_embedding", "wte.weight"),
                ("position_embedding", "wpe.weight"),
                ("attn_norm", "ln_1"),
                ("mlp_norm", "ln_2"),
                (".qkv", ".attn.c_attn"),
                (".out", ".attn.c_proj"),
                (".up", ".mlp.c_fc"),
                (".down", ".mlp.c_proj"),
                ("final_norm", "ln_f"),
                ("head.weight", "lm_head.weight"),
            ):
                theirs = theirs.replace(ours, other)
            value = tensors[theirs]
            parameters[name] = value.T if ".c_" in theirs and value.ndim == 2 else value
            if ".qkv" in name:
                parameters[name] = np.stack(np.split(parameters[name], 3))
        else:
            theirs = name.replace(".scale", ".weight")
            for ours, other in (
                ("token_embedding", "embed_tokens.weight"),
                ("position_embedding", "embed_positions.weight"),
                ("project_in", "project_in.weight"),
                ("project_out", "project_out.weight"),
                (".attn_norm", ".self_attn_layer_norm"),
                (".mlp_norm", ".final_layer_norm"),
                (".out.", ".self_attn.out_proj."),
                (".up", ".fc1"),
                (".down", ".fc2"),
                ("head.weight", "lm_head.weight"),
            ):
                theirs = theirs.replace(ours, other)
            if theirs.startswith("final_norm"):
                theirs = theirs.replace("final_norm", "final_layer_norm")
            if ".qkv" in theirs:
                names = [theirs.replace(".qkv", f".self_attn.{part}_proj") for part in "qkv"]
                parameters[name] = np.stack([tensors[part] for part in names])
            else:
                parameters[name] = tensors[theirs]
    return parameters


def assert_parameters(checkpoint: Checkpoint, tensors: Tensors, dtype: Any) -> None:
    wanted = expected(checkpoint.config, tensors)
    shapes = parameter_shapes(checkpoint.config)
    assert list(checkpoint.parameters) == list(shapes)
    for name, value in checkpoint.parameters.items():
        assert isinstance(value, jax.Array)
        assert (name, value.shape, value.dtype) == (name, shapes[name], np.dtype(dtype))
        np.testing.assert_array_equal(np.asarray(value), wanted[name].astype(dtype), err_msg=name)


@pytest.mark.parametrize("prefix", ["transformer.", ""])
@pytest.mark.parametrize("n_files", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_every_layout_of_gpt2_is_read(tmp_path: Path, prefix: str, n_files: int, tied: bool) -> None:
    config = {**GPT2, "tie_word_embeddings": tied}
    tensors = gpt2_tensors(config, prefix=prefix)
    loaded = load_checkpoint(write_checkpoint(tmp_path, config, tensors, n_files=n_files), dtype=np.float32)
    assert_parameters(loaded, {name.removeprefix(prefix): value for name, value in tensors.items()}, "f4")
    assert loaded.directory == tmp_path
    assert loaded.config == gpt_config(
        vocab_size=11,
        n_positions=6,
        hidden_size=4,
        n_layers=2,
        n_heads=2,
        ffn_size=5,
        tie_embeddings=tied,
        bos_token_id=0,
        eos_token_ids=(10,),
    )


@pytest.mark.parametrize("prefix", ["model.decoder.", "decoder."])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_layer_norm_before": False},
        {"_remove_final_layer_norm": True},
        {"enable_bias": False},
        {"word_embed_proj_dim": 4},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_every_layout_of_opt_is_read(
    tmp_path: Path, prefix: str, tied: bool, options: dict[str, Any]
) -> None:
    config = {**OPT, "tie_word_embeddings": tied, **options}
    tensors = opt_tensors(config, prefix=prefix)
    loaded = load_checkpoint(write_checkpoint(tmp_path, config, tensors), dtype=np.float32)
    assert_parameters(loaded, {name.removeprefix(prefix): value for name, value in tensors.items()}, "f4")
    assert loaded.config == gpt_config(
        vocab_size=11,
        n_positions=6,
        hidden_size=4,
        n_layers=2,
        n_heads=2,
        ffn_size=5,
        activation="relu",
        norm="post" if "do_layer_norm_before" in options else "pre",
        final_norm=not {"do_layer_norm_before", "_remove_final_layer_norm"} & set(options),
        use_bias="enable_bias" not in options,
        tie_embeddings=tied,
        position_offset=2,
        embedding_size=config["word_embed_proj_dim"],
        bos_token_id=2,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize("stored", ["F16", "BF16", "F32", "F64"])
@pytest.mark.parametrize("asked", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_any_float_dtype_is_converted(tmp_path: Path, stored: str, asked: Any) -> None:
    tensors = {name: value.astype(DTYPES[stored]) for name, value in gpt2_tensors(prefix="").items()}
    loaded = load_checkpoint(write_checkpoint(tmp_path, GPT2, tensors), dtype=asked)
    assert_parameters(loaded, tensors, asked)


def test_a_tensor_of_many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "_CHUNK_BYTES", 40)  # two rows of some, less than one of others
    tensors = gpt2_tensors(prefix="")
    loaded = load_checkpoint(write_checkpoint(tmp_path, GPT2, tensors), dtype=np.float32)
    assert_parameters(loaded, tensors, "f4")


def test_data_need_not_be_aligned(tmp_path: Path) -> None:
    tensors = gpt2_tensors(prefix="")
    odd: Tensors = {"h.0.attn.bias": np.ones((1, 1, 3), "i1")}
    loaded = load_checkpoint(write_checkpoint(tmp_path, GPT2, odd | tensors), dtype=np.float32)
    assert_parameters(loaded, tensors, "f4")


def test_masks_among_the_weights_are_passed_over(tmp_path: Path) -> None:
    tensors = gpt2_tensors()
    masks = {
        f"transformer.h.{i}.attn.{name}": np.ones((1, 1, 6, 6), "f4")
        for i in range(2)
        for name in ("bias", "masked_bias")
    }
    assert load_checkpoint(write_checkpoint(tmp_path, GPT2, tensors | masks), dtype=np.float32).parameters


def test_a_tied_head_may_be_stored_too(tmp_path: Path) -> None:
    tensors = gpt2_tensors()
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    loaded = load_checkpoint(write_checkpoint(tmp_path, GPT2, tensors), dtype=np.float32)
    assert "head.weight" not in loaded.parameters


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_a_tied_head_may_have_another_dtype(tmp_path: Path, dtype: Any) -> None:
    """A rounded copy of the embedding is the tied head; other numbers are a separate head."""
    tensors = gpt2_tensors()
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].astype(dtype)
    loaded = load_checkpoint(write_checkpoint(tmp_path / "tied", GPT2, tensors), dtype=np.float32)
    assert "head.weight" not in loaded.parameters
    tensors["lm_head.weight"][-1, -1] += dtype(1)
    with pytest.raises(BadModelConfig, match="set it to false to use the separate head"):
        load_checkpoint(write_checkpoint(tmp_path / "other", GPT2, tensors), dtype=np.float32)


def test_a_buffer_that_the_index_does_not_list(tmp_path: Path) -> None:
    """Old trainers saved masks and rotary frequencies without listing them. A weight must be listed."""
    mask, extra = "transformer.h.0.attn.bias", "transformer.h.0.attn.scale"
    more = {mask: np.ones((1, 1, 6, 6), np.float32), extra: np.ones(4, np.float32)}
    directory = write_checkpoint(tmp_path, GPT2, gpt2_tensors() | more, n_files=2)
    index = json.loads((directory / INDEX).read_text())

    def unlisted(*names: str) -> None:
        listed = {name: file for name, file in index["weight_map"].items() if name not in names}
        (directory / INDEX).write_text(json.dumps(index | {"weight_map": listed}))

    for left_out in (extra, "transformer.h.0.attn.c_attn.bias"):
        unlisted(mask, left_out)
        with pytest.raises(TensorMismatch, match=f"'{re.escape(left_out)}': .*{INDEX} puts it in None"):
            load_checkpoint(directory, dtype=np.float32)
    directory = write_checkpoint(tmp_path / "right", GPT2, gpt2_tensors() | {mask: more[mask]}, n_files=2)
    index = json.loads((directory / INDEX).read_text())
    unlisted(mask)
    assert load_checkpoint(directory, dtype=np.float32).parameters


def test_the_vocabulary_is_padded_to_a_multiple(tmp_path: Path) -> None:
    config = {**GPT2, "tie_word_embeddings": False}
    tensors = gpt2_tensors(config)
    directory = write_checkpoint(tmp_path, config, tensors)
    loaded = load_checkpoint(directory, dtype=np.float32, vocab_multiple=8)
    assert loaded.config.padded_vocab_size == 16
    for name, theirs in (("token_embedding", "transformer.wte.weight"), ("head.weight", "lm_head.weight")):
        value = np.asarray(loaded.parameters[name])
        np.testing.assert_array_equal(value[:11], tensors[theirs])
        assert value.shape == (16, 4) and not value[11:].any()


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    tensors = gpt2_tensors()
    progress: list[tuple[int, int]] = []
    directory = write_checkpoint(tmp_path, GPT2, tensors)
    load_checkpoint(directory, dtype=np.float32, on_bytes=lambda done, total: progress.append((done, total)))
    total = sum(value.nbytes for value in tensors.values())
    assert len(progress) == len(tensors)
    assert progress == sorted(progress) and {of for _, of in progress} == {total} and progress[-1][0] == total


def test_a_link_is_followed(tmp_path: Path) -> None:
    # The hub's cache is made of links from a snapshot's directory to where the files lie.
    real = write_checkpoint(tmp_path / "blobs", GPT2, gpt2_tensors(), n_files=2)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in real.iterdir():
        (snapshot / path.name).symlink_to(os.path.relpath(path, snapshot))
    assert load_checkpoint(find_directory(str(snapshot)), dtype=np.float32).parameters


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"model": {"vocab": {"a": 0, "b": 9}}, "added_tokens": [{"id": 10, "content": "<end>"}]},
        {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}},
    ],
)
def test_a_tokenizer_may_leave_rows_unused(tmp_path: Path, tokenizer: object) -> None:
    write_checkpoint(tmp_path, GPT2, gpt2_tensors())
    write_json(tmp_path / "tokenizer.json", tokenizer)
    assert read_config(tmp_path).vocab_size == 11


def test_general_names_of_sizes_and_defaults(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2",
        "vocab_size": 11,
        "max_position_embeddings": 6,
        "hidden_size": 4,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "n_inner": None,
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-6,
        "reorder_and_upcast_attn": True,
        "n_ctx": 6,
    }
    write_json(tmp_path / "config.json", config)
    assert read_config(tmp_path) == gpt_config(
        vocab_size=11,
        n_positions=6,
        hidden_size=4,
        n_layers=2,
        n_heads=2,
        ffn_size=16,
        activation="gelu",
        layer_norm_eps=1e-6,
    )


def test_a_hub_name_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, GPT2, gpt2_tensors())
    asked: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_directory("openai-community/gpt2") == tmp_path
    name, options = asked[0]
    assert name == "openai-community/gpt2"
    assert options["allow_patterns"] == ["*.json", "*.safetensors", "*.jinja"]
    files = ["config.json", "additional_chat_templates/rag.jinja", "chat_template.jinja"]
    folders = ["onnx/model.safetensors", "a/b.json", "addition.bin", "assets/x.json", "adapter/config.json"]
    assert [*filter_repo_objects([*files, *folders], **options)] == files


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **options: Any) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(NotACheckpoint, match=r"no directory some/model.*hub.*no route to host"):
        find_directory("some/model")


def test_numbers_beyond_float16(tmp_path: Path) -> None:
    for stored in ("F32", "BF16"):
        tensors = {name: value.astype(DTYPES[stored]) for name, value in gpt2_tensors().items()}
        tensors["transformer.ln_f.bias"][1] = 1e6
        directory = write_checkpoint(tmp_path, GPT2, tensors)
        assert load_checkpoint(directory, dtype=ml_dtypes.bfloat16).parameters
        with pytest.raises(
            TensorMismatch, match=r"model\.safetensors: tensor 'transformer\.ln_f\.bias'.*float16"
        ):
            load_checkpoint(directory, dtype=np.float16)


def test_a_dtype_that_is_not_computed_in(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, GPT2, gpt2_tensors())
    with pytest.raises(ConfigError, match="dtype is float64; it must be float32, bfloat16 or float16"):
        load_checkpoint(tmp_path, dtype=np.float64)
