"""GLM-4.5 to 4.7 (GLM Team, 2025): DeepSeek-V3's experts with grouped heads, half of each head rotated.

GLM-4.7-Flash (`glm4_moe_lite`) has DeepSeek's latent attention too. A checkpoint has layers after the last
one that predict further tokens (next_token.py).
"""

from typing import Any

from orca_jax.errors import BadModelConfig, UnsupportedModel
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import (
    common_fields,
    decoder,
    read_layer,
    read_n_layers,
    read_sizes,
    relative,
)
from orca_jax.families.decoders.rope_fields import read_rotary, rotary_size_field
from orca_jax.families.further_layer import AFTER_LAST
from orca_jax.families.mixtures import deepseek
from orca_jax.families.mixtures.experts_in_files import (
    FUSED,
    SHARED_EXPERTS,
    WEIGHTS,
    mixed_fields,
    read_corrected_experts,
    read_mixed,
)
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.strict_json import shown

# transformers' defaults of fields that a file may lack.
_EPS, _PARTIAL, _MULTIPLIER = 1e-5, 0.5, 1.0
_LITE_MULTIPLIER, _LITE_QUERY_RANK = 1.8, 768
_N_SHARED = _N_DENSE = 1

_DENSE, _SPARSE = "dense", "sparse"  # a layer's kind in `mlp_layer_types`


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    rotary = read_rotary(fields, head_size=sizes.head_size, n_positions=sizes.n_positions, partial=_PARTIAL)
    layer = read_layer(
        fields,
        sizes,
        qkv_bias=fields.flag("attention_bias", False),
        eps=_EPS,
        qk_norm="head" if fields.flag("use_qk_norm", False) else None,
        rotary=rotary,
    )
    experts = read_corrected_experts(fields, multiplier=_MULTIPLIER)
    mixed = read_mixed(fields, layer, experts, n_shared=_N_SHARED)
    first = fields.whole("first_k_dense_replace", default=_N_DENSE)
    return decoder(fields, sizes, [layer if i < first else mixed for i in range(sizes.n_layers)])


def _write(model: ModelConfig) -> dict[str, Any] | None:
    rotary, experts = model.attention.rotary, mixed_fields(model)
    if rotary is None or experts is None:
        return None
    mixed = [i for i, layer in enumerate(model.layers) if layer.experts is not None]
    return (
        common_fields(model)
        | experts
        | {
            "attention_bias": model.attention.qkv_bias,
            "first_k_dense_replace": mixed[0],
            "partial_rotary_factor": rotary_size_field(rotary, model.head_size),
            "use_qk_norm": model.attention.qk_norm is not None,
        }
    )


def _read_lite(fields: ConfigFields) -> ModelConfig:
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            f"{shown(fields.path)}: partial_rotary_factor is {fields.raw('partial_rotary_factor')}; "
            "only 1.0 is supported, since qk_rope_head_dim says how much of a head is rotated"
        )
    experts = read_corrected_experts(fields, multiplier=_LITE_MULTIPLIER)
    return deepseek.read_latent_decoder(
        fields,
        experts,
        _sparse_layers(fields),
        interleaved=fields.flag("rope_interleave", True),
        eps=_EPS,
        query_rank=_LITE_QUERY_RANK,
        n_shared=_N_SHARED,
    )


def _sparse_layers(fields: ConfigFields) -> list[bool]:
    """Read `mlp_layer_types`, by default all but the first `_SPARSE`. Raises BadModelConfig."""
    n_layers = read_n_layers(fields)
    kinds = fields.texts("mlp_layer_types")
    if kinds is None:
        kinds = [_DENSE] * _N_DENSE + [_SPARSE] * (n_layers - _N_DENSE)
    elif len(kinds) != n_layers or not set(kinds) <= {_DENSE, _SPARSE}:
        raise BadModelConfig(
            f"{shown(fields.path)}: mlp_layer_types: expected {n_layers} of {_DENSE}, {_SPARSE}, "
            f"found {shown(list(kinds))}"
        )
    sparse = [kind == _SPARSE for kind in kinds]
    n_dense = sparse.index(True) if True in sparse else n_layers
    if fields.whole("first_k_dense_replace", default=n_dense) != n_dense:  # transformers does not read it
        raise BadModelConfig(
            f"{shown(fields.path)} disagrees with itself: first_k_dense_replace is "
            f"{fields.whole('first_k_dense_replace')}, but by mlp_layer_types, or its default, the first "
            f"layer with experts is {n_dense}"
        )
    return sparse


def _write_lite(model: ModelConfig) -> dict[str, Any] | None:
    written, rotary = deepseek.latent_fields(model), model.attention.rotary
    if written is None or rotary is None:
        return None
    experts = [layer.experts for layer in model.layers]
    return written | {
        "mlp_layer_types": [_DENSE if each is None else _SPARSE for each in experts],
        "rope_interleave": rotary.interleaved,
    }


GLM4_MOE = relative(
    model_type="glm4_moe",
    title="GLM-4.5",
    architectures=("Glm4MoeForCausalLM", "Glm4MoeModel"),
    config_names=deepseek.CONFIG_NAMES,
    read=_read,
    write=_write,
    weights={**WEIGHTS, **SHARED_EXPERTS},
    alternatives=FUSED,
    unread=deepseek.UNREAD,
    further=AFTER_LAST,
)
GLM4_MOE_LITE = relative(
    model_type="glm4_moe_lite",
    title="GLM-4.7-Flash",
    architectures=("Glm4MoeLiteForCausalLM", "Glm4MoeLiteModel"),
    config_names=deepseek.CONFIG_NAMES,
    read=_read_lite,
    write=_write_lite,
    weights=deepseek.WEIGHTS,
    alternatives=FUSED,
    unread=deepseek.UNREAD,
    further=AFTER_LAST,
)
