"""Fields of a config.json that a family does not read: harmful ones are refused, all others are named.

data/config_fields.json (scripts.make_config_facts) has the fields that transformers' code of each language
model reads. None of them may pass unseen: a field that a family's own reference reads is read here, refused,
or listed with the reason why it changes nothing; one of another family is refused, or listed below.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import BadModelConfig, CheckpointError, ConfigError, UnsupportedModel
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.family import Family
from orca_jax.families.hf_config import read_hf_config
from orca_jax.families.registry import FAMILIES
from orca_jax.families.unread_fields import HARMFUL, HARMLESS, UNREAD, harm_of, is_common, words_of
from tests.host.families.published_checkpoints import PUBLISHED

REFERENCE: dict[str, list[str]] = json.loads(
    (Path(__file__).parent / "data" / "config_fields.json").read_text()
)["families"]
GOLDEN = Path(__file__).parents[2] / "data" / "golden"
OF_ANY = sorted({name for names in REFERENCE.values() for name in names})

# Fields of other families' references that open, and why.
SIZES = re.compile(
    r"sizes?|dims?|width|channels?|embd|inner|len|length|ctx|embeddings|vocab|model|dff|n_words|expansion"
)
OTHER_INPUTS = re.compile(
    r"vision|image|audio|video|visual|speech|acoustic|asr|diarization|speakers?|patch|patcher|patching|pixel|mm"
    r"|projector|projection|resampler|tts|t2u|vocoder|frame|temporal|spatial|langs?|languages?|mel|codebook"
    r"|codebooks|chroma|tiles|aspect|downsample|upsample|tdnn|ctc|spec|adaptor|sampling|samples|resolution"
    r"|semantic|timestamp|delay|depthwise|ext|vq|vocabulary|standardize|pronunciation|shape|indices|auxiliary"
    r"|pooling|encoder"
)
OTHERS = {
    "another way to compute the same": (
        *(
            "autocast_kernel_dtype",
            "deterministic_flash_attn",
            "chunkwise_kernel",
            "sequence_kernel",
            "step_kernel",
            "weight_mode",
            "mode",
        ),
        *("use_associative_scan", "use_mambapy", "onnx_export", "init_device", "max_inference_chunksize"),
    ),
    "training": ("drop_path_rate", "embed_init_std", "embedding_fraction", "gradient_clipping", "seed"),
    "of generation, or of what transformers returns": ("max_new_tokens", "end_n_top", "start_n_top"),
    "tensors besides, none of which may be left over": (
        *("asm", "asm_cutoffs", "concat_input", "num_centroids", "prompt_types", "segment_types"),
        *("use_mask_token", "use_task_id"),
    ),
}


def test_fields_that_any_reference_reads_are_refused_or_listed() -> None:
    listed = {name for names in OTHERS.values() for name in names}
    opens = {name for name in OF_ANY if harm_of(name, 7) is None and not is_common(name)} - UNREAD.keys()
    of_a_kind = {
        name
        for name in opens
        if name.endswith(("token_id", "token_index"))
        or any(SIZES.fullmatch(word) or OTHER_INPUTS.fullmatch(word) for word in words_of(name))
    }
    assert opens - of_a_kind == listed | {"n_words", "is_encoder"} - of_a_kind
    assert len(OF_ANY) - len(opens) > 600  # the larger part is refused


def test_a_harmful_field_is_refused_in_every_family(tmp_path: Path) -> None:
    """Each file is one of a family's, with a field that the family's reference code does not read."""
    for model_type, config in _configs().items():
        own = {*REFERENCE[model_type], *FAMILIES[model_type].unread, *config}
        for harm, name in _EXAMPLES.items():
            if name in own:
                continue
            (tmp_path / "config.json").write_text(json.dumps(config | {name: 3}))
            with pytest.raises(
                UnsupportedModel, match=re.escape(f"{name} is 3: this field is not known")
            ) as error:
                read_hf_config(tmp_path)
            assert harm in str(error.value)


_EXAMPLES = {
    "how positions are encoded": "rope_variant",
    "which tokens attend to which": "attention_window_pattern",
    "a factor or a bound": "logit_scale_up",
    "the norms": "post_norm_kind",
    "biases": "extra_bias",
    "the feed-forward layers": "gate_kind",
    "how the layers are connected": "residual_form",
    "experts": "expert_choice",
    "layers that are not attention": "mamba_d_state",
    "which weights are the same": "tied_inside",
    "how the weights are stored": "quantization_bits",
    "an adapter": "lora_rank",
    "what the head predicts": "diffusion_steps",
}


def test_every_kind_of_harm_has_its_example() -> None:
    assert len(_EXAMPLES) == len(HARMFUL)
    for harm, name in _EXAMPLES.items():
        found = harm_of(name, 3)
        assert found is not None and harm in found.changes


@pytest.mark.parametrize("model_type", [*FAMILIES])
def test_fields_that_the_familys_reference_reads_are_read_refused_or_listed(model_type: str) -> None:
    family, config = FAMILIES[model_type], _configs()[model_type]
    before = _outcome(family, config)
    passed = [
        name
        for name in REFERENCE[model_type]
        if all(_outcome(family, _with(config, name, value)) == before for value in (7, True, "strange"))
    ]
    unexplained = [
        name for name in passed if not (is_common(name) or name in family.unread or name in UNREAD)
    ]
    assert set(unexplained) <= _WITHOUT_EFFECT.get(model_type, set())


_QWEN3_5_IMAGES = {
    *("image_token_id", "video_token_id", "vision_config", "in_channels", "out_hidden_size", "patch_size"),
    *("spatial_merge_size", "temporal_patch_size"),
}
_GEMMA4_OTHERS = {
    *("audio_config", "audio_token_id", "image_token_id", "video_token_id", "vision_config"),
    *("gradient_clipping", "output_proj_dims", "patch_size", "pooling_kernel_size", "standardize"),
    *("moe_intermediate_size", "num_experts", "top_k_experts"),  # without enable_moe_block
}
_LLAMA4_IMAGES = {
    *("image_size", "image_token_id", "num_channels", "patch_size", "pixel_shuffle_ratio", "vision_config"),
    *("projector_input_dim", "projector_output_dim"),
}
# What a reference names and does not compute with here.
_WITHOUT_EFFECT = {
    "falcon": {"_is_quantized"},
    "qwen2_moe": {"max_window_layers"},  # without layer_types a window is refused
    "gemma3_text": {"mm_tokens_per_image", "image_token_id", "vision_config"},
    "gemma3": {
        *("mm_tokens_per_image", "image_token_id", "image_token_index", "boi_token_index", "eoi_token_index"),
        "vision_config",
    },
    "kimi_k25": {
        *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
        *("merge_kernel_size", "patch_size", "projection_hidden_size", "vision_config"),
        "tie_word_embeddings",  # outside of text_config, which has its own
    },
    "gemma4_text": _GEMMA4_OTHERS,
    "gemma4": _GEMMA4_OTHERS | {"boa_token_id", "boi_token_id", "eoa_token_index", "eoi_token_id"},
    "llama4_text": _LLAMA4_IMAGES,
    "llama4": _LLAMA4_IMAGES | {"boi_token_index", "eoi_token_index", "image_token_index"},
    "bamba": {"mamba_chunk_size"},
    "falcon_h1": {"mamba_chunk_size"},
    "granitemoehybrid": {"mamba_chunk_size"},
    "qwen3_5_text": _QWEN3_5_IMAGES,
    "qwen3_5": _QWEN3_5_IMAGES | {"vision_start_token_id", "vision_end_token_id"},
    "qwen3_5_moe_text": _QWEN3_5_IMAGES | {"intermediate_size"},
    "qwen3_5_moe": _QWEN3_5_IMAGES | {"intermediate_size", "vision_start_token_id", "vision_end_token_id"},
    "lfm2": {"full_attn_idxs"},  # layer_types decides where a file has both
    "mistral3": {"image_token_index", "image_token_id", "spatial_merge_size", "vision_config"},
}


def _with(config: dict[str, Any], name: str, value: object) -> dict[str, Any]:
    if "text_config" in config and name not in config:
        return config | {"text_config": config["text_config"] | {name: value}}
    return config | {name: value}


def _outcome(family: Family, config: dict[str, Any]) -> object:
    """The model that a file describes, or that it is refused."""
    fields = ConfigFields(Path("config.json"), config)
    try:
        model = family.read(fields)
        fields.leave_others(family.unread)
    except (ConfigError, CheckpointError):
        return None
    return model


@cache
def _configs() -> dict[str, dict[str, Any]]:
    """A config.json of each family."""
    found = {config["model_type"]: config for config in (each.config for each in PUBLISHED.values())}
    for path in sorted(GOLDEN.glob("*/config.json")):
        config = json.loads(path.read_text())
        found.setdefault(config["model_type"], config)
    plain = {
        model_type: {name: value for name, value in config.items() if name != "quantization_config"}
        for model_type, config in found.items()
    }
    return {model_type: plain[model_type] for model_type in FAMILIES}


LLAMA = PUBLISHED["meta-llama/Llama-3.2-1B-Instruct"].config


def read(tmp_path: Path, **changes: Any) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    return read_hf_config(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"_model_name_or_path": "Llama 3.2"},
        {"neftune_noise_alpha": 5.0},
        {"model_max_length": 8192},
        {"tokenizer_model_max_length": 8192},
        {"axolotl_version": "0.9"},
        {"use_flash_attn": True},
        {"global_step": 1000},
        {"image_token_id": 5},
        {"torchCompileMode": "max"},
    ],
)
def test_a_field_that_no_reference_reads_opens_and_is_named(tmp_path: Path, fields: dict[str, Any]) -> None:
    plain = read(tmp_path)
    found = read(tmp_path, **fields)
    assert found.model == plain.model
    assert found.unread == (*fields,)
    assert found.note == f"{tmp_path / 'config.json'}: not used: {', '.join(fields)}"
    assert plain.note == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": None, "use_sliding_window": False, "layer_types": []},
        {"partial_rotary_factor": 1.0, "logit_scale": 1, "residual_multiplier": 1.0},
        {"num_experts": 0, "moe_layers": [], "quantization_config": None, "adapters": {}},
        {"torch_dtype": "float8_e4m3fn", "dtype": "auto", "attn_implementation": "flash_attention_2"},
        {"attention_dropout": 0.5, "router_aux_loss_coef": 0.1, "my_dropout": 1},
    ],
)
def test_a_value_that_turns_its_computation_off_opens(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert read(tmp_path, **fields).model == read(tmp_path).model


@pytest.mark.parametrize(
    ("fields", "harm"),
    [
        ({"partial_rotary_factor": 0.5}, "how positions are encoded"),
        ({"rope_interleaved": True}, "how positions are encoded"),
        ({"use_alibi": True}, "how positions are encoded"),
        ({"sliding_window": 4096}, "which tokens attend to which"),
        ({"attention_sinks": 4}, "which tokens attend to which"),
        ({"final_logit_softcapping": 30.0}, "a factor or a bound"),
        ({"mup_enabled": True}, "a factor or a bound"),
        ({"logit_scale": True}, "a factor or a bound"),
        ({"qkv_bias": True}, "which tokens attend to which"),
        ({"num_experts": 8}, "experts"),
        ({"use_parallel_residual": True}, "how the layers are connected"),
        ({"per_layer_config": {"0": {}}}, "how the layers are connected"),
        ({"quantization": {"bits": 4}}, "how the weights are stored"),
        ({"dim_model_base": 256}, "the logits"),
        ({"swigluLimit": 7.0}, "a factor or a bound"),
    ],
)
def test_a_harmful_field_is_refused_with_what_it_changes(
    tmp_path: Path, fields: dict[str, Any], harm: str
) -> None:
    with pytest.raises(UnsupportedModel, match=next(iter(fields))) as error:
        read(tmp_path, **fields)
    assert harm in str(error.value)


def test_every_entry_has_its_reason() -> None:
    for table in (HARMLESS, UNREAD, *(family.unread for family in FAMILIES.values())):
        assert all(reason.strip() for reason in table.values())


ROPE = {"factor": 4.0, "original_max_position_embeddings": 32768}


def rope(tmp_path: Path, **fields: Any) -> Any:
    plain = {name: value for name, value in LLAMA.items() if name not in ("rope_scaling", "rope_theta")}
    (tmp_path / "config.json").write_text(json.dumps(plain | {"rope_theta": 1e6} | fields))
    return read_hf_config(tmp_path).model.attention.rotary


def test_every_spelling_of_a_scaling_is_the_same(tmp_path: Path) -> None:
    old = rope(tmp_path, rope_scaling={"type": "yarn", **ROPE})
    assert (old.scaling.kind, old.scaling.factor, old.base) == ("yarn", 4.0, 1e6)
    both = {"type": "yarn", "rope_type": "yarn", **ROPE}
    theta = {"rope_theta": 1e6}
    assert rope(tmp_path, rope_scaling=both) == old
    assert (
        rope(tmp_path, rope_scaling={"rope_type": "yarn", **ROPE, "finetuned": True, "attn_factor": 2}) == old
    )
    # What transformers 5 writes after it has read the first, and with the old object left beside it.
    assert rope(tmp_path, rope_parameters=both | theta, rope_theta=None) == old
    assert rope(tmp_path, rope_parameters=both | theta, rope_scaling={"type": "yarn", **ROPE}) == old
    for nothing in ({}, {"type": "default"}, {"rope_type": "default", "type": "default"}, {"type": None}):
        assert rope(tmp_path, rope_scaling=nothing) == rope(tmp_path)
        assert rope(tmp_path, rope_parameters=nothing) == rope(tmp_path)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear", **ROPE}}, BadModelConfig, "disagrees"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "mrope", **ROPE}}, UnsupportedModel, "mrope"),
        ({"rope_scaling": {"factor": 4.0}}, UnsupportedModel, "rope_scaling.factor is 4.0"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "alpha": 2}}, UnsupportedModel, "alpha"),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0, "mrope_section": [1]}},
            UnsupportedModel,
            "mrope",
        ),
        (
            {
                "rope_parameters": {"rope_type": "yarn", **ROPE},
                "rope_scaling": {"type": "yarn", **ROPE, "factor": 8.0},
            },
            BadModelConfig,
            "factor differs in rope_parameters and rope_scaling",
        ),
    ],
)
def test_unsupported_and_unclear_scalings_are_refused(
    tmp_path: Path, fields: dict[str, Any], error: type[CheckpointError], words: str
) -> None:
    with pytest.raises(error, match=words):
        rope(tmp_path, **fields)


def test_custom_code_is_ignored_where_transformers_has_the_class(tmp_path: Path) -> None:
    code = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "org/repo--mine.LlamaForCausalLM"}
    assert read(tmp_path, auto_map=code).unread == ("auto_map",)
    with pytest.raises(UnsupportedModel, match="auto_map"):
        read(tmp_path, auto_map=code | {"AutoModel": "mine.LlamaWithMemory"})


def test_an_architecture_is_known_in_any_case(tmp_path: Path) -> None:
    assert read(tmp_path, architectures=["LLaMAForCausalLM"]).model == read(tmp_path).model
    with pytest.raises(UnsupportedModel, match="LlamaForSequenceClassification"):
        read(tmp_path, architectures=["LlamaForSequenceClassification"])


def test_an_empty_list_of_end_tokens_is_none(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=[]).model.eos_token_ids == ()
