"""quantization_config: which layers of a checkpoint are quantized, how, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import CheckpointError, ConfigError, UnsupportedModel
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.hf_config import read_hf_config
from orca_jax.families.packed_form import Joined, PackedForm, fp8, w4, w8, w8a8
from orca_jax.families.quantization_config import Quantization, StoredMatrix, read_quantization, rounded_forms
from tests.quantized_checkpoints import FORMATS, SMALL_LLAMA, rounded_inputs

Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def read(section: Any) -> Quantization | None:
    return read_quantization(ConfigFields(Path("config.json"), {"quantization_config": section}))


def how(section: Any, module: str = Q) -> StoredMatrix | None:
    found = read(section)
    assert found is not None
    return found.of(module)


def group(**changes: Any) -> dict[str, Any]:
    """The only group of a section of W4A16, changed."""
    section = FORMATS["w4a16"].section["config_groups"]["group_0"]
    return {**section, **changes}


def section(*groups: dict[str, Any], **changes: Any) -> dict[str, Any]:
    named = {f"group_{i}": one for i, one in enumerate(groups or (group(),))}
    return {**FORMATS["w4a16"].section, "config_groups": named, **changes}


def weights(**changes: Any) -> dict[str, Any]:
    return section(group(weights={**group()["weights"], **changes}))


def test_layers_are_quantized_or_ignored_by_name_and_pattern() -> None:
    ignored = section(ignore=["lm_head", DOWN, "re:.*self_attn\\.(k|v)_proj$"])
    assert how(ignored) == StoredMatrix(layout="words", bits=4, group=32)
    for module in ("lm_head", DOWN, "model.layers.1.self_attn.k_proj"):
        assert how(ignored, module) is None
    assert how(ignored, "model.layers.1.mlp.down_proj") is not None


def test_a_layer_belongs_to_the_most_exact_of_several_groups() -> None:
    by_bits = {
        8: group(targets=[DOWN], weights={**group()["weights"], "num_bits": 8}),
        4: group(targets=["Linear"]),
    }
    channel = group(targets=["re:.*down_proj"], weights={**group()["weights"], "strategy": "channel"})
    channel["weights"]["group_size"] = None
    for order in ((4, 8), (8, 4)):
        found = section(*(by_bits[bits] for bits in order), channel)
        assert [getattr(how(found, module), "bits", None) for module in (Q, DOWN)] == [4, 8]
        assert how(found, "model.layers.1.mlp.down_proj") == StoredMatrix(layout="words", bits=4, group=None)


def test_the_numbers_of_each_method() -> None:
    gptq = FORMATS["gptq"].section
    assert how(gptq) == StoredMatrix(layout="gptq", bits=4, group=32, less_one=True, scale_names=("scales",))
    assert how(gptq, "lm_head") is None
    assert how({**gptq, "lm_head": True}, "lm_head") is not None
    dynamic = {"+:.*down": {"bits": 8, "group_size": -1}, "-:.*q_proj": {}}
    assert how({**gptq, "dynamic": dynamic}) is None
    changed = how({**gptq, "dynamic": dynamic}, DOWN)
    assert changed is not None and (changed.bits, changed.group) == (8, None)
    only = {**gptq, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}
    assert how(only) is not None and how(only, DOWN) is None
    awq = {**FORMATS["awq"].section, "modules_to_not_convert": ["q_proj"]}
    assert how(awq) is None and how(awq, DOWN) is not None
    fp8_ = {**FORMATS["deepseek"].section, "modules_to_not_convert": ["gate", "model.layers.1"]}
    assert how(fp8_) is None and how(fp8_, "model.layers.0.mlp.gate") is None
    assert how(fp8_, "model.layers.0.mlp.gate_proj") is not None


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("w4a16", w4(32, scale="bfloat16")),
        ("w4a16-zeros", w4(32, zeros=True, scale="bfloat16")),
        ("w4a16-channel", w4(None, scale="float32")),
        ("w8a16", w8(32, scale="bfloat16")),
        ("w8a8", w8a8()),
        ("fp8-channel", fp8(None)),
        ("deepseek", fp8(32)),
        ("gptq", w4(32, scale="float16")),
        ("awq", w4(32, zeros=True, scale="float16")),
    ],
)
def test_the_forms_of_a_model(tmp_path: Path, name: str, form: PackedForm) -> None:
    config = {**SMALL_LLAMA, "quantization_config": FORMATS[name].section}
    (tmp_path / "config.json").write_text(json.dumps(config))
    forms = read_hf_config(tmp_path).model.weight_forms
    assert forms == {
        f"layers.{i}.{weight}.weight": form for i in range(2) for weight in ("qkv", "out", "up", "down")
    }


def test_a_fused_weight_of_several_forms(tmp_path: Path) -> None:
    config = {**SMALL_LLAMA, "quantization_config": section(ignore=["lm_head", "re:.*v_proj"])}
    (tmp_path / "config.json").write_text(json.dumps(config))
    form = read_hf_config(tmp_path).model.weight_forms["layers.0.qkv.weight"]
    assert isinstance(form, Joined) and len(form.forms) == 2


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (section(format="marlin-24"), "format: expected one of pack-quantized"),
        (section(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is set"),
        (section(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is set"),
        (section(transform_config={"config_groups": {"R1": {}}}), "transform_config is set"),
        (section(quantization_status="frozen"), "quantization_status: expected compressed, found frozen"),
        (section(group(output_activations={"num_bits": 8})), "rounded results are not supported"),
        (
            section(group(input_activations=rounded_inputs("int"))),
            "activations of int8, symmetric, dynamic by token",
        ),
        (section(unheard_of=3), "unheard_of"),
        (weights(num_bits=3), "found int of 3"),
        (weights(unheard_of=3), "weights.unheard_of"),
        (weights(strategy="attn_head"), "strategy: expected tensor, channel, group"),
        (weights(group_size=0), "strategy"),
        (weights(actorder="sideways"), "actorder: expected group, weight or null"),
        ({**FORMATS["gptq"].section, "bits": 3}, "bits: expected 4 or 8, found 3"),
        (
            {**FORMATS["gptq"].section, "checkpoint_format": "marlin"},
            "expected gptq or gptq_v2, found marlin",
        ),
        ({**FORMATS["gptq"].section, "group_size": 0}, "group_size: expected -1 or at least 1, found 0"),
        ({**FORMATS["gptq"].section, "adapter": {"rank": 8}}, "adapter"),
        ({**FORMATS["awq"].section, "version": "gemv"}, "version: expected gemm, found gemv"),
        ({**FORMATS["awq"].section, "zero_point": False}, "zero_point: expected true, found False"),
        ({**FORMATS["deepseek"].section, "fmt": "e5m2"}, "fmt: expected one of e4m3"),
        ({**FORMATS["deepseek"].section, "weight_block_size": [128]}, "weight_block_size: expected two"),
        ({**FORMATS["deepseek"].section, "activation_scheme": "static"}, "dynamic, with weight_block_size"),
        (section(ignore=["re:(.*a)*b"]), "too complex for a pattern"),
        (section(ignore=["re:.*.*.*.*.*.*b"]), "too complex for a pattern"),
        (section(ignore=["re:" + "a?" * 30 + "a" * 30]), "too complex for a pattern"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        read(bad)


@pytest.mark.parametrize(
    "bad",
    [
        section(config_groups={}),
        section(config_groups=3),
        section(ignore=["re:("]),
        section(ignore=3),
        section(group(targets=[3])),
        weights(num_bits="4"),
        {**FORMATS["gptq"].section, "bits": None},
    ],
)
def test_what_is_malformed_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        read(bad)


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "quark", "modelopt", None, 3])
def test_other_methods_are_not_read_here(method: Any) -> None:
    assert read({"quant_method": method, "bits": 4}) is None


def test_patterns_of_published_checkpoints_are_no_more_complex_than_allowed() -> None:
    patterns = [
        "re:.*lm_head",
        "re:.*mlp.gate$",
        "re:vision_tower.*",
        "re:.*block_sparse_moe.gate",
        "re:model[.]layers[.](0|1|2|31)[.].*",
        r"re:.*\.(q|k|v|o|gate|up|down)_proj$",
        "re:^(?!.*self_attn).*$",
    ]
    assert how(section(ignore=patterns[:-1]), "model.layers.5.mlp.act") is not None
    assert how(section(ignore=patterns), "model.layers.5.self_attn.qkv") is not None


def test_rounding_at_load(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL_LLAMA))
    model = read_hf_config(tmp_path).model
    for to, form in (("int4", w4(32)), ("int8", w8(None, scale="float32")), ("fp8", fp8(None))):
        assert set(rounded_forms(model, to).values()) == {form}  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="quantized already"):
        rounded_forms(model.with_forms(rounded_forms(model, "int8")), "int4")
    (tmp_path / "config.json").write_text(json.dumps({**SMALL_LLAMA, "intermediate_size": 90}))
    with pytest.raises(ConfigError, match=r"multiples of 32 inputs, but layers\.0\.down\.weight has 90"):
        rounded_forms(read_hf_config(tmp_path).model, "int4")
