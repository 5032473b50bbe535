"""A checkpoint of every family, made by transformers, with one thing wrong: the error names it.

The golden checkpoints are the right ones. A family is in the list as soon as it has one.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.errors import BadModelConfig, CheckpointError, TensorMismatch, UnsupportedModel
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.hf_config import read_config
from orca_jax.families.registry import FAMILIES
from tests.device.checkpoint.tiny_checkpoint import Tensors, write_checkpoint
from tests.device.model.golden import DIRECTORY, NAMES

Config = dict[str, Any]


def _config_of(name: str) -> Config:
    return json.loads((DIRECTORY / name / "config.json").read_text())


OF_FAMILY = {_config_of(name)["model_type"]: name for name in reversed(NAMES)}


@cache
def _tensors_of(name: str) -> Tensors:
    directory = DIRECTORY / name
    return {
        key: value
        for file in sorted(directory.glob("*.safetensors"))
        for key, value in load_file(file).items()
    }


def _wrong_tensors(tensors: Tensors) -> Iterator[tuple[str, Tensors, str]]:
    """Wrong tensors: a description, the tensors, and the name in the error."""
    in_layer = re.compile(r".*\b1\b.*")
    kinds = {re.sub(r"\b\d+\b", "{i}", name): name for name in tensors if in_layer.fullmatch(name)}
    outside = [name for name in tensors if not re.search(r"\b\d+\b", name)]
    for name in [*kinds.values(), *outside]:
        rest = {key: value for key, value in tensors.items() if key != name}
        yield "missing", rest, name
        values = tensors[name]
        longer = np.concatenate([values, values[:1]]) if values.ndim else np.zeros(2, values.dtype)
        yield "one row more", tensors | {name: longer}, name
        yield "of another rank", tensors | {name: values[None]}, name
        yield "of whole numbers", tensors | {name: values.astype("i1")}, name
    yield "too many", tensors | {"adapter.weight": np.zeros(3, "f4")}, "adapter.weight"


@pytest.mark.parametrize("model_type", OF_FAMILY)
def test_missing_misshaped_and_extra_tensors(tmp_path: Path, model_type: str) -> None:
    name = OF_FAMILY[model_type]
    config = _config_of(name)
    for i, (what, tensors, meant) in enumerate(_wrong_tensors(_tensors_of(name))):
        directory = write_checkpoint(tmp_path / str(i), config, tensors)
        with pytest.raises(TensorMismatch) as raised:
            load_checkpoint(directory, dtype=np.float32)
        assert f"'{meant}'" in str(raised.value), (what, str(raised.value))


def _wrong_configs(model_type: str, config: Config) -> Iterator[tuple[Config, type[CheckpointError], str]]:
    """A change of config.json, the type of the error, and words of its message."""
    family = FAMILIES[model_type]
    heads = family.config_names["n_heads"]
    for wrong in (0, -2, 1 << 20, "four", None):
        yield {heads: wrong}, BadModelConfig, heads
    kv_heads = family.config_names.get("n_kv_heads", "")
    if kv_heads in config:
        for wrong in (0, config[heads] + 1, 2 * config[heads]):
            yield {kv_heads: wrong}, BadModelConfig, kv_heads
    layers = family.config_names["n_layers"]
    # Nemotron-H's number follows from the list of its layers, and Gemma 4 says more about single ones.
    if layers in config and "per_layer_config" not in config:
        fewer = config[layers] - 1
        # These have an entry for each layer.
        of_layers = ("layer_types", "mlp_layer_types", "no_rope_layers", "indexer_types")
        changed: Config = {name: config[name][:fewer] for name in of_layers if config.get(name)}
        if "moe_layers" in config:
            changed["moe_layers"] = [layer for layer in config["moe_layers"] if layer < fewer]
        yield {layers: fewer, **changed}, BadModelConfig, f"layer {fewer}"
    sizes = ("vocab_size", "vocab_size_per_layer_input")
    larger = {name: config[name] + 1 for name in sizes if name in config}
    yield larger, TensorMismatch, "expected shape"
    yield {"architectures": ["StrangeForCausalLM"]}, UnsupportedModel, "StrangeForCausalLM"
    yield {"quantization_config": {"quant_method": "hqq", "bits": 4}}, UnsupportedModel, "quantization_config"
    yield {"odd_attention": True}, UnsupportedModel, "odd_attention"
    yield {"odd_scale": 3}, UnsupportedModel, "odd_scale"
    if "rope_parameters" in config:
        spiral = _of_all_layers(config, {"rope_type": "spiral", "rope_theta": 1e4})
        twisted = _of_all_layers(config, {"rope_type": "default", "rope_theta": 1e4, "twist_factor": 2.0})
        yield {"rope_parameters": spiral}, UnsupportedModel, "spiral"
        older = {"rope_parameters": None, "rope_scaling": {"type": "spiral", "factor": 2.0}}
        yield older, UnsupportedModel, "spiral"
        yield {"rope_parameters": twisted}, UnsupportedModel, "twist_factor"


def _of_all_layers(config: Config, rope: Config) -> Config:
    """`rope` as the rope_parameters of a family that has one for each kind of layer, or one for all."""
    return (
        rope if "rope_type" in config["rope_parameters"] else dict.fromkeys(config["rope_parameters"], rope)
    )


@pytest.mark.parametrize("model_type", OF_FAMILY)
def test_impossible_and_unknown_configs(tmp_path: Path, model_type: str) -> None:
    name = OF_FAMILY[model_type]
    right, tensors = _config_of(name), _tensors_of(name)
    for i, (wrong, error, word) in enumerate(_wrong_configs(model_type, right)):
        directory = write_checkpoint(tmp_path / str(i), right | wrong, tensors)
        with pytest.raises(CheckpointError) as raised:
            load_checkpoint(directory, dtype=np.float32)
        assert type(raised.value) is error, (wrong, str(raised.value))
        assert word in str(raised.value), (wrong, str(raised.value))


@pytest.mark.parametrize("name", NAMES)
def test_a_written_config_reads_as_the_same_model(name: str) -> None:
    model = read_config(DIRECTORY / name)
    family = FAMILIES[_config_of(name)["model_type"]]
    written = family.write(model)
    assert written is not None
    assert family.read(ConfigFields(Path("config.json"), json.loads(json.dumps(written)))) == model
