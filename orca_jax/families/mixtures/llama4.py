"""Llama 4 (Meta, 2025), text alone.

Most layers attend within chunks, with rotary positions and a norm of queries and keys after them; every
fourth attends to all tokens, without positions, and with queries scaled by theirs. A token takes one expert,
whose inputs its score multiplies, and a shared one.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orca_jax.errors import BadModelConfig
from orca_jax.families.attention_config import QKNorm, Scores, Temperature
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import (
    FULL,
    common_fields,
    decoder,
    read_layer,
    read_sizes,
    relative,
)
from orca_jax.families.decoders.rope_fields import read_rotary, rope_parameters, without_rope
from orca_jax.families.decoders.smollm3 import read_rotated
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.mixtures.experts_in_files import first_sparse
from orca_jax.families.model_config import Layer, ModelConfig
from orca_jax.families.stored_name import StoredName, all_experts, as_it_is, linear, projections
from orca_jax.families.strict_json import shown
from orca_jax.families.text_part import text_part

CHUNKED = "chunked_attention"
# transformers' defaults of fields that a file may lack.
_HEAD_SIZE, _BASE, _EPS, _CHUNK, _FLOOR, _SCALE, _DENSE = 128, 500_000.0, 1e-5, 8192, 8192, 0.1, 16_384
_LAYER = "{prefix}layers.{i}."
_FED = f"{_LAYER}feed_forward."
_WEIGHTS: Mapping[str, StoredName] = {
    **projections("layers.{i}.up", _FED, ("gate", "up")),
    **linear("layers.{i}.down", f"{_FED}down_proj"),
    "layers.{i}.router.weight": as_it_is(f"{_FED}router.weight"),
    "layers.{i}.experts.up.weight": all_experts(f"{_FED}experts.gate_up_proj", transpose=True),
    "layers.{i}.experts.down.weight": all_experts(f"{_FED}experts.down_proj", transpose=True),
    **projections("layers.{i}.shared.up", f"{_FED}shared_expert.", ("gate", "up")),
    **linear("layers.{i}.shared.down", f"{_FED}shared_expert.down_proj"),
}


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields, head_size=_HEAD_SIZE)
    rotary = read_rotary(
        fields,
        head_size=sizes.head_size,
        n_positions=sizes.n_positions,
        default_base=_BASE,
        interleaved=True,
    )
    layer = read_layer(fields, sizes, bias=fields.flag("attention_bias", False), eps=_EPS, rotary=rotary)
    layer = layer.with_feed_forward(size=fields.whole("intermediate_size_mlp", default=_DENSE))
    qk_norm = None
    if fields.flag("use_qk_norm", True):
        qk_norm = QKNorm(norm=layer.norm, after_rotation=True, scaled=False)
    scale, step = fields.number("attn_scale", _SCALE), fields.whole("floor_scale", default=_FLOOR)
    temperature = None
    if fields.flag("attn_temperature_tuning", True):
        temperature = Temperature(scale=scale, step=step, offset=1)
    turned = layer.with_attention(qk_norm=qk_norm)
    plain = layer.with_attention(rotary=None, scores=Scores(temperature=temperature))
    rotated = read_rotated(fields, sizes.n_layers)
    kinds = _read_kinds(fields, rotated)
    sparse = _read_sparse(fields, sizes.n_layers)
    chunk = fields.whole_or_null("attention_chunk_size", _CHUNK)
    if chunk is None and CHUNKED in kinds:
        raise BadModelConfig(
            f"{shown(fields.path)} disagrees with itself: layers have {CHUNKED}, but attention_chunk_size is "
            "null"
        )
    every: list[Layer] = []
    for has_rotary, kind, has_experts in zip(rotated, kinds, sparse, strict=True):
        own = turned if has_rotary else plain
        own = _with_experts(fields, own) if has_experts else own
        every.append(own if kind == FULL else _in_chunks(own, chunk))
    return decoder(fields, sizes, every)


def _in_chunks(layer: Layer, size: int | None) -> Layer:
    assert layer.attention is not None
    return layer.with_attention(scores=replace(layer.attention.scores, window=size, chunked=True))


def _with_experts(fields: ConfigFields, dense: Layer) -> Layer:
    size = fields.whole("intermediate_size")
    experts = Experts(
        number=fields.whole("num_local_experts"),
        top_k=fields.whole("num_experts_per_tok", default=1),
        scores="sigmoid",
        weighs_inputs=True,
        shared_size=size,
    )
    return dense.with_feed_forward(size=size, experts=experts)


def _read_kinds(fields: ConfigFields, rotated: list[bool]) -> list[str]:
    """Read `layer_types`, by default chunks in the layers with rotary positions. Raises BadModelConfig."""
    found = fields.texts("layer_types")
    if found is None:
        return [CHUNKED if turned else FULL for turned in rotated]
    if len(found) != len(rotated) or not set(found) <= {FULL, CHUNKED}:
        raise BadModelConfig(
            f"{shown(fields.path)}: layer_types: expected {len(rotated)} of {FULL}, {CHUNKED}, "
            f"found {shown(list(found))}"
        )
    return [*found]


def _read_sparse(fields: ConfigFields, n_layers: int) -> list[bool]:
    """Read which layers have experts: `moe_layers`, or each `interleave_moe_layer_step`-th one."""
    every = fields.whole("interleave_moe_layer_step", default=1)
    if fields.raw("moe_layers") is not None:
        listed = fields.numbers("moe_layers")
        if not all(isinstance(i, int) and 0 <= i < n_layers for i in listed):
            raise BadModelConfig(
                f"{shown(fields.path)}: moe_layers: expected layers from 0 to {n_layers - 1}, "
                f"found {shown(list(listed))}"
            )
        return [i in listed for i in range(n_layers)]
    if every < 1:
        raise BadModelConfig(
            f"{shown(fields.path)}: interleave_moe_layer_step: expected at least 1, found {every}"
        )
    return [(i + 1) % every == 0 for i in range(n_layers)]


def _write(model: ModelConfig) -> dict[str, Any] | None:
    sparse, own = first_sparse(model), model.attentions
    rotary = next((each.rotary for each in own if each.rotary is not None), None)
    if sparse is None or sparse.experts is None or rotary is None or len(own) != model.n_layers:
        return None
    dense = next((each for each in model.feed_forwards if each.experts is None), None)
    temperature = next((each.scores.temperature for each in own if each.scores.temperature), None)
    chunk = next((each.scores.window for each in own if each.scores.chunked), None)
    written = without_rope(common_fields(model)) | rope_parameters(rotary)
    written |= {
        "attention_bias": model.attention.qkv_bias,
        "intermediate_size": sparse.size,
        "intermediate_size_mlp": _DENSE if dense is None else dense.size,
        "num_local_experts": sparse.experts.number,
        "num_experts_per_tok": sparse.experts.top_k,
        "moe_layers": [i for i, layer in enumerate(model.layers) if layer.experts is not None],
        "no_rope_layers": [int(each.rotary is not None) for each in own],
        "layer_types": [CHUNKED if each.scores.chunked else FULL for each in own],
        "attention_chunk_size": chunk,
        "use_qk_norm": any(each.qk_norm is not None for each in own),
        "attn_temperature_tuning": temperature is not None,
    }
    if temperature is not None:
        written |= {"attn_scale": temperature.scale, "floor_scale": temperature.step}
    return written


LLAMA4_TEXT = relative(
    model_type="llama4_text",
    title="Llama 4",
    architectures=("Llama4ForCausalLM", "Llama4TextModel"),
    config_names={
        "ffn_size": "intermediate_size or intermediate_size_mlp",
        "window": "attention_chunk_size",
        "n_experts": "num_local_experts",
        "top_k": "num_experts_per_tok",
        "shared_size": "intermediate_size",
        "temperature_scale": "attn_scale",
    },
    read=_read,
    write=_write,
    weights=_WEIGHTS,
    unread={"for_llm_compressor": "another way to compute the same"},
)
LLAMA4 = text_part(
    LLAMA4_TEXT,
    model_type="llama4",
    title="Llama 4 with vision",
    architectures=("Llama4ForConditionalGeneration",),
    prefixes=("language_model.model.", "model.language_model.", "model."),
    head="language_model.lm_head.weight",
    parts=r"(model\.)?(vision_model|multi_modal_projector)\..*",
    defaults={
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "num_local_experts": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
