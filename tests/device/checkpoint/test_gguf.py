"""GGUF files: each family's weights and shape are its checkpoint's, and each type's numbers are right."""

import math
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from orca_jax.checkpoint.convert import convert_checkpoint
from orca_jax.checkpoint.directory import Checkpoint, find_parameters, load_checkpoint
from orca_jax.checkpoint.gguf_planes import split, unpacked
from orca_jax.errors import BadModelConfig, CheckpointError, TensorMismatch, UnsupportedModel
from orca_jax.families.gguf_models import ARCHITECTURES
from orca_jax.families.hf_config import read_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.packed_form import GGUF_FORMS, joined
from orca_jax.families.parameters import parameter_table, stage_bytes
from orca_jax.families.weight_form import DENSE
from orca_jax.model import packed_weight
from orca_jax.model.weight import JoinedWeight, PackedWeight
from orca_jax.model_files.found_model import find_model
from orca_jax.request.chat.template_files import load_chat_template
from tests.device.checkpoint.tiny_checkpoint import write_json
from tests.device.model.golden import DIRECTORY
from tests.gguf_bytes import (
    BLOCK_TYPES,
    I32,
    U64,
    Tensor,
    Value,
    as_gguf,
    float_tensor,
    gguf_bytes,
    random_tensor,
    read_json,
    small_model,
    small_tensors,
)

# Golden checkpoints that llama.cpp can compute, and changes of their config.json that make it so.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-grouped": {},
    "llama-linear": {},
    "llama3-rope-tied": {},
    "mistral-no-window-head-size": {},
    "mixtral-grouped": {},
    "qwen2-tied": {},
    "qwen2-yarn": {},
    "qwen2-moe-shared": {},
    "qwen3-tied": {},
    "qwen3-moe-renormalised": {},
    "gemma-head-size": {},
    "gemma2-caps": {"query_pre_attn_scalar": 10},
    "gemma3-linear": {"query_pre_attn_scalar": 10},
    "phi3-longrope": {},
    "phi3-partial-window": {},
    "olmo2-grouped": {},
    "olmoe-grouped": {},
    "starcoder2-window": {},
    "granite-multipliers": {},
    "gpt-oss-yarn": {},
    "gpt2-tied-gelu-new": {},
    "bloom-eps": {},
    "gpt-neox-partial": {},
    "gpt-neox-sequential-tied": {"hidden_act": "gelu"},
    "falcon-multi-query-bias": {"tie_word_embeddings": True},
    "falcon-new-decoder": {},
    "deepseek-v2-groups-yarn-dense-first": {},
    "deepseek-v2-greedy-no-query-rank": {},
    "deepseek-v3-groups-yarn-dense-first": {},
    "t5-relu": {},
    "t5-gated": {},
    "t5-few-buckets": {"relative_attention_max_distance": 128},
    "mt5-untied": {},
    "umt5-untied": {},
}


def _written(path: Path, metadata: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_read_as_its_checkpoint_is(tmp_path: Path, name: str) -> None:
    _assert_read_as_its_checkpoint(tmp_path, name)


@pytest.mark.parametrize("name", ["deepseek-v2-greedy-no-query-rank", "deepseek-v3-groups-yarn-dense-first"])
def test_latent_keys_and_values_in_two_tensors(tmp_path: Path, name: str) -> None:
    """As newer files have them."""
    _assert_read_as_its_checkpoint(tmp_path, name, keys_and_values=True)


def _assert_read_as_its_checkpoint(tmp_path: Path, name: str, *, keys_and_values: bool = False) -> None:
    config = read_json(DIRECTORY / name / "config.json") | FAMILIES[name]
    write_json(tmp_path / "config.json", config)
    tensors: dict[str, np.ndarray] = {}
    for file in sorted((DIRECTORY / name).glob("*.safetensors")):
        (tmp_path / file.name).symlink_to(file)
        tensors |= load_file(file)
    for index in (DIRECTORY / name).glob("*.index.json"):
        (tmp_path / index.name).symlink_to(index)
    path = tmp_path / "model.gguf"
    path.write_bytes(as_gguf(config, tensors, keys_and_values=keys_and_values))
    expected = load_checkpoint(tmp_path, dtype=np.float32)
    found = load_checkpoint(path, dtype=np.float32)
    _assert_same_model(found.config, expected.config)
    assert found.parameters.keys() == expected.parameters.keys()
    for key, values in expected.parameters.items():
        # Gemma's norms have 1 + w, rounded.
        exact = "norm" not in key or not name.startswith("gemma")
        np.testing.assert_allclose(
            found.parameters[key], values, rtol=0, atol=0 if exact else 1e-6, err_msg=key
        )


def _assert_same_model(found: ModelConfig, expected: ModelConfig) -> None:
    """Equal but for numbers of rotary scalings that give the same frequencies and the same factor."""
    for mine, right in zip(found.attentions, expected.attentions, strict=True):
        one, other = mine.rotary, right.rotary
        if one is None or other is None:
            assert mine == right
            continue
        frequencies = [each.frequencies(found.n_positions) for each in (one, other)]
        np.testing.assert_allclose(*frequencies, rtol=1e-6)
        assert one.attention_factor == pytest.approx(other.attention_factor, rel=1e-6)
        assert (one.size, one.interleaved) == (other.size, other.interleaved)
    layers = tuple(
        mine.with_attention(rotary=right.rotary)
        for mine, right in zip(found.layers, expected.attentions, strict=True)
    )
    found = replace(found, layers=layers)
    differing = [one.name for one in fields(found) if getattr(found, one.name) != getattr(expected, one.name)]
    assert not differing, [(getattr(found, one), getattr(expected, one)) for one in differing]


# One block of each type: its first bytes, then a repeated byte for the rest; numbers follow from the format.
@pytest.mark.parametrize(
    ("kind", "block", "expected"),
    [
        ("Q4_0", b"\x00\x40" + bytes([0x3F]) * 16, [2 * (15 - 8)] * 16 + [2 * (3 - 8)] * 16),
        ("Q4_1", b"\x00\x40\x00\x3c" + bytes([0x3F]) * 16, [2 * 15 + 1] * 16 + [2 * 3 + 1] * 16),
        (
            "Q5_0",
            b"\x00\x40" + b"\x01\x00\x00\x80" + bytes([0x3F]) * 16,
            [2 * (31 - 16)] + [2 * (15 - 16)] * 15 + [2 * (3 - 16)] * 15 + [2 * (19 - 16)],
        ),
        (
            "Q5_1",
            b"\x00\x40\x00\x3c" + b"\x01\x00\x00\x80" + bytes([0x3F]) * 16,
            [2 * 31 + 1] + [2 * 15 + 1] * 15 + [2 * 3 + 1] * 15 + [2 * 19 + 1],
        ),
        ("Q8_0", b"\x00\x40" + bytes([0xFE]) * 31 + b"\x7f", [-4.0] * 31 + [254.0]),
        ("IQ4_NL", b"\x00\x40" + bytes([0x0F]) * 16, [226.0] * 16 + [-254.0] * 16),
        ("MXFP4", b"\x80" + bytes([0x7E]) * 16, [-8.0] * 16 + [12.0] * 16),
        (
            # Scales 1, 2, 3, 4 with minimum 1; the last four runs have scale 5 and minimum 2.
            "Q4_K",
            b"\x00\x40\x00\x3c"
            + bytes([1, 2, 3, 4, 1, 1, 1, 1, 0x25, 0x25, 0x25, 0x25])
            + bytes([0x3F]) * 128,
            [2 * scale * code - 1 for scale, code in ((1, 15), (2, 3), (3, 15), (4, 3)) for _ in range(32)]
            + [2 * 5 * code - 2 for code in (15, 3, 15, 3) for _ in range(32)],
        ),
        (
            # The high bits of run 1 alone.
            "Q5_K",
            b"\x00\x40\x00\x3c"
            + bytes([1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1])
            + b"\x02" * 32
            + bytes([0x3F]) * 128,
            [2 * code for code in (15, 19, 15, 3, 15, 3, 15, 3) for _ in range(32)],
        ),
        (
            # High bits 0, 1, 2, 3 for the four runs of each half; scales 1 to 16.
            "Q6_K",
            bytes([0x3F]) * 128 + bytes([0b11100100]) * 64 + bytes(range(1, 17)) + b"\x00\x40",
            [
                2 * (2 * run + i // 16 + 1) * (code - 32)
                for run, code in enumerate((15, 15 + 16, 3 + 32, 3 + 48) * 2)
                for i in range(32)
            ],
        ),
    ],
)
def test_the_numbers_of_a_block(kind: str, block: bytes, expected: list[float]) -> None:
    planes = split(kind, np.frombuffer(block, np.uint8)[None])
    np.testing.assert_array_equal(unpacked(kind, planes)[0], np.array(expected, np.float32))


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_raw_bytes_as_the_gguf_package_unpacks_them(kind: str) -> None:
    """To the bit. The file, with the package's own numbers, is of scripts/golden/gguf_types.py."""
    with np.load(DIRECTORY / "gguf_types.npz") as file:
        blocks, expected = file[kind], file[f"{kind}."]
    assert np.ptp(blocks) == 255 and expected.dtype == np.float32
    np.testing.assert_array_equal(unpacked(kind, split(kind, blocks)), expected)
    together = unpacked(kind, split(kind, blocks.reshape(2, -1)))  # blocks of two rows
    np.testing.assert_array_equal(together, expected.reshape(2, -1))


def _dense(values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The numbers of a weight, packed or not."""
    if isinstance(values, JoinedWeight):
        parts = [_dense(part, ()) for part in values.parts()]
        return np.concatenate(parts).reshape(shape)
    if isinstance(values, PackedWeight):
        values = packed_weight.unpacked(values.form, values.arrays, np.float32)
    return np.asarray(values).reshape(shape or np.shape(values))


def _assert_same_numbers(path: Path, expected: dict[str, Any], config: ModelConfig) -> None:
    """A file's weights, as it has them and all dense, are these dense ones."""
    packed, dense = load_checkpoint(path, dtype=np.float32), load_checkpoint(path, dtype=np.float32, forms={})
    assert dense.config == config and packed.config.with_forms({}) == config
    assert dense.parameters.keys() == packed.parameters.keys() == expected.keys()
    n_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(packed.parameters))
    assert n_bytes == stage_bytes(packed.config, range(config.n_layers), 1, 4)
    for name, values in expected.items():
        np.testing.assert_array_equal(dense.parameters[name], values, err_msg=name)
        found = packed.parameters[name]
        if name.endswith("out.weight") and isinstance(found, PackedWeight):
            heads = config.attention
            values = np.asarray(values).reshape(len(values), heads.group, heads.n_kv_heads, heads.head_size)
            values = values.swapaxes(1, 2).reshape(len(values), -1)
        np.testing.assert_array_equal(_dense(found, values.shape), values, err_msg=name)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *BLOCK_TYPES])
def test_a_model_of_each_type(tmp_path: Path, kind: str) -> None:
    """The numbers are those of the same model in float32."""
    tensors = small_tensors(kind)
    path = _written(tmp_path / "packed.gguf", small_model(), tensors)
    expected = _in_float32(tmp_path, tensors)
    _assert_same_numbers(path, expected.parameters, expected.config)
    forms = load_checkpoint(path, dtype=np.float32).config.weight_forms
    assert [*forms.values()] == ([GGUF_FORMS[kind]] * 5 if kind in BLOCK_TYPES else [])


def test_a_model_of_mixed_types(tmp_path: Path) -> None:
    """Types that differ within a weight of ours, and a dense matrix among them."""
    kinds = {"attn_q": "Q5_0", "attn_k": "Q5_0", "attn_v": "Q6_K", "ffn_gate": "Q4_K", "ffn_up": "F16"}
    dice, tensors = np.random.default_rng(3), small_tensors("Q4_1")
    for part, kind in kinds.items():
        name = f"blk.0.{part}.weight"
        tensors[name] = random_tensor(dice, kind, tensors[name].shape)
    path = _written(tmp_path / "mixed.gguf", small_model(), tensors)
    expected = _in_float32(tmp_path, tensors)
    _assert_same_numbers(path, expected.parameters, expected.config)
    forms = load_checkpoint(path, dtype=np.float32).config.weight_forms
    assert forms["layers.0.qkv.weight"] == joined(
        [GGUF_FORMS["Q5_0"], GGUF_FORMS["Q5_0"], GGUF_FORMS["Q6_K"]]
    )
    assert forms["layers.0.up.weight"] == joined([GGUF_FORMS["Q4_K"], DENSE])


@pytest.mark.parametrize(
    "kinds", [("MXFP4", "MXFP4", "MXFP4"), ("Q4_K", "Q4_K", "Q6_K"), ("Q4_0", "Q8_0", "Q4_0")]
)
def test_experts(tmp_path: Path, kinds: tuple[str, str, str]) -> None:
    """Gate, up and down of all experts; where gate and up have two types, both are dense."""
    dice, tensors = np.random.default_rng(4), small_tensors("Q8_0")
    for part, kind in zip(("gate", "up", "down"), kinds, strict=True):
        del tensors[f"blk.0.ffn_{part}.weight"]
        tensors[f"blk.0.ffn_{part}_exps.weight"] = random_tensor(dice, kind, (3, 256, 256))
    tensors["blk.0.ffn_gate_inp.weight"] = random_tensor(dice, "F32", (3, 256))
    metadata = small_model(llama__expert_count=3, llama__expert_used_count=2)
    path = _written(tmp_path / "experts.gguf", metadata, tensors)
    expected = _in_float32(tmp_path, tensors, metadata)
    _assert_same_numbers(path, expected.parameters, expected.config)
    forms = load_checkpoint(path, dtype=np.float32).config.weight_forms
    assert forms["layers.0.experts.down.weight"] == GGUF_FORMS[kinds[2]]
    assert ("layers.0.experts.up.weight" in forms) is (kinds[0] == kinds[1])


@pytest.mark.parametrize("kv_repeats", [1, 2])
def test_any_part_of_a_plane_is_read_by_itself(tmp_path: Path, kv_repeats: int) -> None:
    """Devices that share a weight read only their parts of its planes."""
    dice, tensors = np.random.default_rng(5), small_tensors("Q5_K")
    tensors["blk.0.attn_v.weight"] = random_tensor(dice, "Q6_K", (128, 256))
    tensors["blk.0.ffn_up.weight"] = random_tensor(dice, "Q4_1", (256, 256))
    path = _written(tmp_path / "model.gguf", small_model(), tensors)
    model, sources = find_parameters(path, kv_repeats)
    assert model.attention.kv_repeats == kv_repeats
    table = parameter_table(model)
    n_planes = 0
    for name, source in sources.items():
        if not isinstance(source, Mapping):
            continue
        for plane, array in table[name].held_arrays(np.float32).items():
            whole = source[plane].read(array.shape, array.dtype, tuple((0, n) for n in array.shape))
            assert whole.shape == array.shape and whole.dtype == array.dtype
            for _ in range(4):
                box = tuple(_range(dice, n) for n in array.shape)
                part = source[plane].read(array.shape, array.dtype, box)
                expected = whole[tuple(slice(*each) for each in box)]
                np.testing.assert_array_equal(part, expected, err_msg=f"{name} {plane} {box}")
            n_planes += 1
    assert n_planes == 3 * 5 + (5 + 4) + (5 + 3)


def _range(dice: np.random.Generator, n: int) -> tuple[int, int]:
    first, end = sorted(dice.choice(n + 1, 2, replace=False).tolist())
    return first, end


def _in_float32(
    folder: Path, tensors: dict[str, Tensor], metadata: dict[str, Any] | None = None
) -> Checkpoint:
    """The same model, written in float32."""
    numbers = {name: float_tensor(_numbers(one)) for name, one in tensors.items()}
    path = _written(folder / "plain.gguf", small_model() if metadata is None else metadata, numbers)
    return load_checkpoint(path, dtype=np.float32)


def _numbers(tensor: Tensor) -> np.ndarray:
    if tensor.type in BLOCK_TYPES:
        rows = np.frombuffer(tensor.data, np.uint8).reshape(math.prod(tensor.shape[:-1]), -1)
        return unpacked(tensor.type, split(tensor.type, rows)).reshape(tensor.shape)
    if tensor.type == "BF16":
        return (np.frombuffer(tensor.data, "<u2").astype("<u4") << 16).view("<f4").reshape(tensor.shape)
    return np.frombuffer(tensor.data, {"F32": "<f4", "F16": "<f2"}[tensor.type]).reshape(tensor.shape)


def test_a_vector_may_be_packed(tmp_path: Path) -> None:
    tensors = small_tensors()
    tensors["output_norm.weight"] = random_tensor(np.random.default_rng(1), "Q8_0", (256,))
    path = _written(tmp_path / "model.gguf", small_model(), tensors)
    found = load_checkpoint(path, dtype=np.float32).parameters["final_norm.scale"]
    rows = np.frombuffer(tensors["output_norm.weight"].data, np.uint8)[None]
    np.testing.assert_array_equal(found, unpacked("Q8_0", split("Q8_0", rows))[0])


def test_missing_misshaped_and_further_tensors(tmp_path: Path) -> None:
    right, path = small_tensors(), tmp_path / "model.gguf"
    for name in right:
        missing = {each: tensor for each, tensor in right.items() if each != name}
        error: type[CheckpointError] = BadModelConfig if name == "token_embd.weight" else TensorMismatch
        with pytest.raises(error, match=f"model.gguf.*'{name}'"):
            load_checkpoint(_written(path, small_model(), missing), dtype=np.float32)
        shape = right[name].shape
        longer = right | {name: float_tensor(np.zeros((*shape[:-1], shape[-1] + 2)))}
        with pytest.raises(TensorMismatch, match=rf"model.gguf.*'{name}'.*expected shape.*found \["):
            load_checkpoint(_written(path, small_model(), longer), dtype=np.float32)
    further = right | {"blk.1.ffn_up.weight": right["blk.0.ffn_up.weight"]}
    with pytest.raises(TensorMismatch, match=r"'blk\.1\.ffn_up\.weight': expected no such tensor"):
        load_checkpoint(_written(path, small_model(), further), dtype=np.float32)


@pytest.mark.parametrize("name", ["llama3-rope-tied", "gemma2-caps", "qwen3-moe-renormalised"])
def test_a_file_is_converted_to_safetensors(tmp_path: Path, name: str) -> None:
    config = read_json(DIRECTORY / name / "config.json") | FAMILIES[name]
    path, target = tmp_path / "model.gguf", tmp_path / "converted"
    path.write_bytes(as_gguf(config, load_file(DIRECTORY / name / "model.safetensors")))
    assert convert_checkpoint(path, target) == "safetensors"
    expected, found = (load_checkpoint(each, dtype=np.float32) for each in (path, target))
    assert found.config == expected.config
    for key, values in expected.parameters.items():
        np.testing.assert_array_equal(found.parameters[key], values, err_msg=key)


def test_packed_weights_and_the_tokenizer_are_converted(tmp_path: Path) -> None:
    tokenizer = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<end>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.chat_template": "{{ messages[0].content }}{{ eos_token }}",
    }
    path = _written(tmp_path / "model.gguf", small_model() | tokenizer, small_tensors("Q5_K"))
    convert_checkpoint(path, tmp_path / "converted", dtype="float32")
    expected = load_checkpoint(path, dtype=np.float32, forms={})
    converted = find_model(tmp_path / "converted", "auto")
    assert converted.config == expected.config and converted.config.eos_token_ids == (3,)
    assert converted.tokenizer is not None and converted.tokenizer.encode("ab<end>") == [2, 3]
    templates = load_chat_template(tmp_path / "converted", None)
    assert templates is not None
    prompt = templates.choose(None, has_tools=False).render([{"role": "user", "content": "ab"}])
    assert prompt == "ab<end>"
    found = load_checkpoint(tmp_path / "converted", dtype=np.float32)
    for key, values in expected.parameters.items():
        np.testing.assert_array_equal(found.parameters[key], values, err_msg=key)


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    tensors = small_tensors()
    tensors["blk.0.ffn_up.weight"] = Tensor("Q2_K", (256, 256), bytes(256 * 84))
    path = _written(tmp_path / "model.gguf", small_model(), tensors)
    with pytest.raises(
        UnsupportedModel, match=r"'blk.0.ffn_up.weight' is of the type Q2_K; expected one of F32"
    ):
        read_config(path)


def test_a_model_in_several_files(tmp_path: Path) -> None:
    tensors = small_tensors("Q4_0")
    whole = _in_float32(tmp_path, tensors)
    halves = [dict([*tensors.items()][:4]), dict([*tensors.items()][4:])]
    for i, half in enumerate(halves):
        metadata = (small_model() if i == 0 else {}) | {"split.no": i, "split.count": 2}
        _written(tmp_path / f"b-0000{i + 1}-of-00002.gguf", metadata, half)
    _assert_same_numbers(tmp_path / "b-00001-of-00002.gguf", whole.parameters, whole.config)
    with pytest.raises(CheckpointError, match=r"one of 2 files.*name the first"):
        read_config(tmp_path / "b-00002-of-00002.gguf")
    (tmp_path / "b-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"b-00002-of-00002.gguf cannot be read"):
        read_config(tmp_path / "b-00001-of-00002.gguf")


_ODD = (
    0,
    3,
    1 << 20,
    (1 << 32) - 1,
    Value(U64, (1 << 64) - 1),
    Value(I32, -1),
    1.5,
    float("inf"),
    "x",
    ["a"],
    [1, 2],
)
_KEYS = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"),
    *("attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
    *("attention.key_length", "attention.value_length", "attention.sliding_window", "attention.scale"),
    *("attention.sliding_window_pattern", "rope.freq_base", "rope.freq_base_swa", "rope.dimension_count"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length", "logit_scale", "embedding_scale"),
    *("expert_shared_feed_forward_length", "attn_logit_softcapping", "final_logit_softcapping"),
)


ODD_FIRST = ("llama", "gemma3", "gpt-oss", "deepseek2")


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=() if name in ODD_FIRST else pytest.mark.long) for name in ARCHITECTURES],
)
def test_odd_metadata_is_read_or_refused(tmp_path: Path, architecture: str) -> None:
    """Never another error than a CheckpointError, and soon."""
    right = {f"{architecture}.{key}": 2 for key in _KEYS} | {
        key.replace("llama", architecture): value for key, value in small_model().items()
    }
    right |= {"general.architecture": architecture, f"{architecture}.rope.scaling.type": "yarn"}
    right |= {f"{architecture}.attention.key_length": 64, f"{architecture}.attention.value_length": 64}
    right |= {f"{architecture}.rope.dimension_count": 64}
    tensors, path = small_tensors("Q8_0"), tmp_path / "model.gguf"
    n_refused = 0
    for key in right.keys() - {"general.architecture"}:
        for value in (None, *_ODD):
            changed = {each: one for each, one in (right | {key: value}).items() if one is not None}
            _written(path, changed, tensors)
            start = time.process_time()
            try:
                find_parameters(path)
            except CheckpointError:
                n_refused += 1
            assert time.process_time() - start < 1, (key, value)
    assert n_refused > 50
