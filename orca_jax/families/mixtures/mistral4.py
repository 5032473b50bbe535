"""Mistral 4 (Mistral AI, 2026): latent attention and experts, and Ministral 3's temperature of queries.

Of Mistral's models with vision, Mistral Small 3.1 and 4 and Ministral 3, the text part is served, of any of
the three families.
"""

from dataclasses import replace
from typing import Any

from orca_jax.errors import BadModelConfig, UnsupportedModel
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import read_n_layers, relative
from orca_jax.families.decoders.mistral import (
    MINISTRAL3,
    MISTRAL,
    ROPE_OTHERS,
    read_temperature,
    with_temperature,
)
from orca_jax.families.decoders.rope_fields import rope_section
from orca_jax.families.mixtures import deepseek
from orca_jax.families.mixtures.experts_in_files import FUSED, LEAST_SUM, read_experts
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.strict_json import shown
from orca_jax.families.text_part import text_part

_PARTIAL = "partial_rotary_factor"
_QUERY_RANK, _N_SHARED = 1024, 1  # transformers' defaults of fields that a file may lack


def _read(fields: ConfigFields) -> ModelConfig:
    for name in ("n_group", "topk_group"):
        if fields.whole(name, default=1) != 1:
            raise UnsupportedModel(
                f"{shown(fields.path)}: {name} is {fields.whole(name)}; groups of experts are not supported "
                "in this family, only 1"
            )
    experts = read_experts(
        fields,
        "n_routed_experts",
        alias="num_local_experts",
        renormalised=fields.flag("norm_topk_prob", True),
        least_sum=LEAST_SUM,
        multiplier=fields.number("routed_scaling_factor", 1.0),
    )
    first = fields.whole("first_k_dense_replace", default=0)
    model = deepseek.read_latent_decoder(
        fields,
        experts,
        [i >= first for i in range(read_n_layers(fields))],
        interleaved=fields.flag("rope_interleave", True),
        query_rank=_QUERY_RANK,
        n_shared=_N_SHARED,
        temperature=read_temperature(fields),
        rope_others=(*ROPE_OTHERS, _PARTIAL),
        whole_heads=True,
    )
    _check_partial(fields, model)
    return model


def _check_partial(fields: ConfigFields, model: ModelConfig) -> None:
    """Raise BadModelConfig where rope_parameters rotates another part of a head than qk_rope_head_dim."""
    latent, found = model.attention.latent, rope_section(fields)
    assert latent is not None and found is not None
    factor = found.number(_PARTIAL, latent.rotary_size / latent.query_size)
    if round(latent.query_size * factor) != latent.rotary_size:
        raise BadModelConfig(
            f"{shown(fields.path)} disagrees with itself: rope_parameters.{_PARTIAL} is {factor} of "
            f"{latent.query_size} elements, and qk_rope_head_dim is {latent.rotary_size}"
        )


def _write(model: ModelConfig) -> dict[str, Any] | None:
    fields, rotary = deepseek.latent_fields(model), model.attention.rotary
    written = fields and with_temperature(model, fields)
    if written is None or rotary is None:
        return None
    mixed = [i for i, layer in enumerate(model.layers) if layer.experts is not None]
    return written | {"first_k_dense_replace": mixed[0], "rope_interleave": rotary.interleaved}


MISTRAL4 = relative(
    model_type="mistral4",
    title="Mistral 4",
    architectures=("Mistral4ForCausalLM", "Mistral4Model"),
    config_names=deepseek.CONFIG_NAMES,
    read=_read,
    write=_write,
    weights={**deepseek.WEIGHTS, **FUSED},  # transformers knows no other layout
)
MISTRAL3 = replace(
    text_part(
        MISTRAL,
        or_texts=(MINISTRAL3, MISTRAL4),
        model_type="mistral3",
        title="Mistral Small 3.1 and 4 and Ministral 3 with vision",
        architectures=("Mistral3ForConditionalGeneration", "Mistral3Model"),
        prefixes=("model.language_model.", "language_model.model.", "language_model.", "model."),
        head="language_model.lm_head.weight",
        parts=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
        defaults={"bos_token_id": 1, "eos_token_id": 2},
        inner=("tie_word_embeddings",),  # outside transformers writes its class's default, true
        unread={"projector_hidden_act": "of the projector", "vision_feature_layer": "of the vision tower"},
    ),
    config_names={**MISTRAL4.config_names, **MISTRAL.config_names},
    weights={**MISTRAL4.weights, **MISTRAL.weights},
    renamed=lambda model: {} if model.attention.latent is None else MISTRAL4.weights,
)
