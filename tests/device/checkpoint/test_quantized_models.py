"""Models with quantized checkpoints: held packed, split, and with the tokens of the numbers they mean."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.convert import convert_checkpoint
from orca_jax.checkpoint.directory import Checkpoint, load_checkpoint
from orca_jax.config import ServingConfig
from orca_jax.errors import ConfigError, TensorMismatch, UnsupportedModel
from orca_jax.families.parameters import stage_bytes
from orca_jax.families.quantization_config import rounded_forms
from orca_jax.model.weight import FormedWeight
from orca_jax.request.request import Request
from tests.device.checkpoint.tiny_checkpoint import Tensors, write_checkpoint
from tests.device.greedy_reference import GreedyReference
from tests.device.harness import harness
from tests.device.model.formed_models import device_bytes, requests, stages
from tests.device.model.golden import DIRECTORY
from tests.quantized_checkpoints import FORMATS, SMALL_LLAMA, Format

pytestmark = pytest.mark.usefixtures("whole_activations")

LLAMA = {**SMALL_LLAMA, "vocab_size": 96, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2}
SERVING = ServingConfig(max_batch_size=4, n_slots=256, max_batch_tokens=64)
ROUNDED_INPUTS = {"w8a8", "fp8-dynamic", "fp8-static", "fp8-tensor"}


def matrices() -> dict[str, tuple[int, int]]:
    """The modules of LLAMA's layers, each with its shape."""
    h, f, kv = 64, 128, 32
    shapes = {
        **{"self_attn.q_proj": (h, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h)},
        **{
            "self_attn.o_proj": (h, h),
            "mlp.gate_proj": (f, h),
            "mlp.up_proj": (f, h),
            "mlp.down_proj": (h, f),
        },
    }
    return {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}


# Matrices of one product, which have one order of inputs.
PRODUCTS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 2, "up_proj": 2, "down_proj": 3}


def tensors_of(form: Format) -> tuple[Tensors, Tensors]:
    """The tensors of a quantized checkpoint, and those of the dense numbers that it means."""
    rng = np.random.default_rng(5)
    plain: Tensors = {
        "model.embed_tokens.weight": rng.normal(size=(96, 64)).astype(np.float32),
        "lm_head.weight": rng.normal(size=(96, 64)).astype(np.float32),
        "model.norm.weight": rng.uniform(0.5, 1.5, 64).astype(np.float32),
    }
    for i in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            plain[f"model.layers.{i}.{norm}.weight"] = rng.uniform(0.5, 1.5, 64).astype(np.float32)
    packed, dense = dict(plain), dict(plain)
    for module, shape in matrices().items():
        order = np.random.default_rng(PRODUCTS[module.rpartition(".")[2]])
        tensors, numbers = form.write(shape, rng, order)
        packed |= {f"{module}.{leaf}": tensor for leaf, tensor in tensors.items()}
        dense[f"{module}.weight"] = numbers
    return packed, dense


def config_of(section: Any) -> dict[str, Any]:
    return {**LLAMA, "quantization_config": section}


def written(directory: Path, form: Format) -> tuple[Path, Path]:
    """A quantized checkpoint, and one of the dense numbers that it means."""
    packed, dense = tensors_of(form)
    return (
        write_checkpoint(directory / "packed", config_of(form.section), packed),
        write_checkpoint(directory / "dense", LLAMA, dense),
    )


def load(directory: Path, tensor: int = 1, n_stages: int = 1) -> tuple[Checkpoint, Any]:
    """The checkpoint on the devices of its stages, and the stages."""
    found = load_checkpoint(directory, dtype=jnp.float32).config.for_devices(tensor)
    parts = stages(n_stages, tensor, found)
    loaded = load_checkpoint(
        directory,
        dtype=jnp.float32,
        vocab_multiple=found.vocab_multiple,
        kv_repeats=found.attention.kv_repeats,
        placements=[part.placement(found) for part in parts],
    )
    for part, stage in zip(parts, loaded.stages, strict=True):
        assert device_bytes(stage) == stage_bytes(loaded.config, part.layers, tensor, 4)
    return loaded, parts


def tokens_of(loaded: Checkpoint, parts: Sequence[Any]) -> list[Request]:
    asked = requests()
    merged = {name: weight for stage in loaded.stages for name, weight in stage.items()}
    harness(loaded.config, merged, SERVING, buckets=(64,), parts=parts).run(asked)
    return asked


def reference(directory: Path) -> GreedyReference:
    dense = load_checkpoint(directory, dtype=jnp.float32)
    return GreedyReference(dense.config, dense.parameters)


@pytest.mark.matrix(but=["w4a16", "w4a16-order", "gptq-zeros", "awq", "int8", "fp8-block"])
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ROUNDED_INPUTS])
def test_tokens_are_those_of_the_numbers(tmp_path: Path, name: str) -> None:
    packed, dense = written(tmp_path, FORMATS[name])
    loaded, parts = load(packed)
    assert sum(isinstance(one, FormedWeight) for one in loaded.parameters.values()) == 8
    truth = reference(dense)
    assert sum(truth.sure(request) for request in tokens_of(loaded, parts)) > 12


@pytest.mark.matrix(but=["awq-2-1"])
@pytest.mark.parametrize(("tensor", "n_stages"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["w4a16", "awq", "gptq-8", "deepseek", "fp8-channel"])
def test_a_model_is_split(tmp_path: Path, name: str, tensor: int, n_stages: int) -> None:
    packed, dense = written(tmp_path, FORMATS[name])
    loaded, parts = load(packed, tensor, n_stages)
    truth = reference(dense)
    assert sum(truth.sure(request) for request in tokens_of(loaded, parts)) > 12


@pytest.mark.matrix(but=["w8a8", "fp8-static"])
@pytest.mark.parametrize("name", sorted(ROUNDED_INPUTS))
def test_rounded_activations_change_little_and_something(tmp_path: Path, name: str) -> None:
    """The product with rounded activations is tested in test_packed_weight.py."""
    packed, dense = written(tmp_path, FORMATS[name])
    own, plain = (
        LLM(directory, dtype="float32", max_batch_size=1, n_slots=128) for directory in (packed, dense)
    )
    with own, plain:
        ids = [*range(3, 40)]
        found, expected = (np.array(llm.score([ids])[0]) for llm in (own, plain))
    error = np.abs(found - expected)
    assert 0 < error.mean() < 0.1


def test_a_scale_of_activations_that_differs_within_one_product(tmp_path: Path) -> None:
    form = FORMATS["fp8-static"]
    tensors, _ = tensors_of(form)
    tensors["model.layers.1.self_attn.k_proj.input_scale"] *= 2
    with pytest.raises(TensorMismatch, match="round their inputs differently"):
        load_checkpoint(write_checkpoint(tmp_path, config_of(form.section), tensors), dtype=jnp.float32)


def test_act_order_is_not_split_by_inputs(tmp_path: Path) -> None:
    packed, _ = written(tmp_path, FORMATS["gptq-order"])
    with pytest.raises(ConfigError, match="weight are in an order of their own"):
        load(packed, 2)


def test_a_layer_that_is_not_quantized_against_the_config(tmp_path: Path) -> None:
    form = FORMATS["w8a16"]
    (tensors, numbers), name = tensors_of(form), "model.layers.1.mlp.up_proj"
    tensors = {key: one for key, one in tensors.items() if not key.startswith(name)}
    tensors[f"{name}.weight"] = numbers[f"{name}.weight"]
    with pytest.raises(
        TensorMismatch, match=f"is not quantized, but quantization_config says that {name} is"
    ):
        load_checkpoint(write_checkpoint(tmp_path, config_of(form.section), tensors), dtype=jnp.float32)


def test_matrices_of_one_product_in_different_orders(tmp_path: Path) -> None:
    form = FORMATS["gptq-order"]
    tensors, _ = tensors_of(form)
    name = "model.layers.1.mlp.up_proj.g_idx"
    tensors[name] = tensors[name][::-1].copy()
    with pytest.raises(TensorMismatch, match="order their inputs differently"):
        load_checkpoint(write_checkpoint(tmp_path, config_of(form.section), tensors), dtype=jnp.float32)


def test_layers_in_several_forms(tmp_path: Path) -> None:
    """Values and a whole layer's feed-forward are not quantized, and the other down projection has 8 bits."""
    section = json.loads(json.dumps(FORMATS["w4a16"].section))
    section["ignore"] += ["re:.*v_proj$", "re:model[.]layers[.]1[.]mlp[.].*"]
    down = json.loads(json.dumps(section["config_groups"]["group_0"])) | {"targets": ["re:.*down_proj"]}
    down["weights"]["num_bits"] = 8
    section["config_groups"]["group_1"] = down
    (tensors, numbers), (eight, eight_numbers) = (tensors_of(FORMATS[name]) for name in ("w4a16", "w8a16"))
    for module in matrices():
        plain = module.endswith("v_proj") or module.startswith("model.layers.1.mlp")
        if plain or module.endswith("down_proj"):
            tensors = {name: one for name, one in tensors.items() if not name.startswith(f"{module}.")}
        if plain:
            tensors[f"{module}.weight"] = numbers[f"{module}.weight"]
        elif module.endswith("down_proj"):
            tensors |= {name: one for name, one in eight.items() if name.startswith(f"{module}.")}
            numbers[f"{module}.weight"] = eight_numbers[f"{module}.weight"]
    loaded, parts = load(write_checkpoint(tmp_path / "packed", config_of(section), tensors))
    truth = reference(write_checkpoint(tmp_path / "dense", LLAMA, numbers))
    assert sum(truth.sure(request) for request in tokens_of(loaded, parts)) > 12


def test_a_mixture_whose_experts_stay_packed(tmp_path: Path) -> None:
    """Mixtral's experts in W4A16; the router, which is ignored, is dense."""
    rng = np.random.default_rng(3)
    config = {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    config |= {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "sliding_window": None,
    }
    form = FORMATS["w4a16"]
    packed: Tensors = {
        "model.embed_tokens.weight": rng.normal(size=(96, 64)).astype(np.float32),
        "lm_head.weight": rng.normal(size=(96, 64)).astype(np.float32),
        "model.norm.weight": np.ones(64, np.float32),
        "model.layers.0.input_layernorm.weight": np.ones(64, np.float32),
        "model.layers.0.post_attention_layernorm.weight": np.ones(64, np.float32),
        "model.layers.0.block_sparse_moe.gate.weight": rng.normal(size=(4, 64)).astype(np.float32),
    }
    dense = dict(packed)
    modules = {f"model.layers.0.self_attn.{x}_proj": (64 if x in "qo" else 32, 64) for x in "qkvo"}
    for i in range(4):
        place = f"model.layers.0.block_sparse_moe.experts.{i}"
        modules |= {f"{place}.w1": (128, 64), f"{place}.w3": (128, 64), f"{place}.w2": (64, 128)}
    for module, shape in modules.items():
        tensors, numbers = form.write(shape, rng, rng)
        packed |= {f"{module}.{leaf}": tensor for leaf, tensor in tensors.items()}
        dense[f"{module}.weight"] = numbers
    section = {**form.section, "ignore": ["lm_head", "re:.*block_sparse_moe.gate"]}
    directory = write_checkpoint(tmp_path / "packed", config | {"quantization_config": section}, packed)
    loaded, parts = load(directory)
    assert isinstance(loaded.parameters["layers.0.experts.up.weight"], FormedWeight)
    truth = reference(write_checkpoint(tmp_path / "dense", config, dense))
    assert sum(truth.sure(request) for request in tokens_of(loaded, parts)) > 12


@pytest.mark.parametrize(
    "to", ["int4", *(pytest.param(to, marks=pytest.mark.long) for to in ("int8", "fp8"))]
)
def test_what_is_rounded_at_load_is_what_convert_writes(tmp_path: Path, to: Any) -> None:
    _, dense = written(tmp_path, FORMATS["fp8-channel"])
    assert convert_checkpoint(dense, tmp_path / "rounded", quantization=to) == "safetensors"
    original = load_checkpoint(dense, dtype=jnp.float32)
    at_load = load_checkpoint(dense, dtype=jnp.float32, forms=rounded_forms(original.config, to))
    converted = load_checkpoint(tmp_path / "rounded", dtype=jnp.float32)
    assert at_load.config == converted.config
    for name, weight in at_load.parameters.items():
        jax.tree.map(np.testing.assert_array_equal, weight, converted.parameters[name])
    sizes = {"max_batch_size": 2, "n_slots": 128, "dtype": "float32"}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [[5, 6, 7], [*range(3, 30)]]
    with LLM(dense, quantization=to, **sizes) as llm:
        first = [each.token_ids for each in llm.generate(prompts, params)]
        llm.update_weights({name: np.asarray(one + 0.1) for name, one in original.parameters.items()})
        changed = [each.token_ids for each in llm.generate(prompts, params)]
    with LLM(tmp_path / "rounded", **sizes) as llm:
        assert [each.token_ids for each in llm.generate(prompts, params)] == first != changed


def test_a_model_that_cannot_be_rounded(tmp_path: Path) -> None:
    packed, _ = written(tmp_path, FORMATS["awq"])
    with pytest.raises(ConfigError, match="quantized already"):
        LLM(packed, quantization="int8")
    with pytest.raises(UnsupportedModel, match="is not the matrix of a linear layer"):
        convert_checkpoint(DIRECTORY / "gpt2-untied-gelu", tmp_path / "out", quantization="int8")
    with pytest.raises(ConfigError, match="written as safetensors, not as orbax"):
        convert_checkpoint(DIRECTORY / "llama-grouped", tmp_path / "out", quantization="int8", to="orbax")


def test_a_quantized_checkpoint_is_converted_to_its_numbers(tmp_path: Path) -> None:
    packed, dense = written(tmp_path, FORMATS["gptq-order"])
    convert_checkpoint(packed, tmp_path / "plain", to="safetensors")
    found, expected = (load_file(place / "model.safetensors") for place in (tmp_path / "plain", dense))
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        np.testing.assert_array_equal(found[name], numbers, err_msg=name)
