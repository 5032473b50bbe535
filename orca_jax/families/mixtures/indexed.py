"""DeepSeek-V3.2 (2025) and GLM-5 (2026): DeepSeek-V3's latent attention, to keys that an indexer selects.

Checkpoints have layers after the last one that predict further tokens (next_token.py).
"""

from collections.abc import Mapping
from typing import Any

from orca_jax.errors import BadModelConfig, UnsupportedModel
from orca_jax.families.attention_config import Indexer
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import read_n_layers, relative
from orca_jax.families.family import Family
from orca_jax.families.further_layer import AFTER_LAST
from orca_jax.families.mixtures import deepseek
from orca_jax.families.mixtures.experts_in_files import FUSED, read_corrected_experts
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.stored_name import StoredName, as_it_is
from orca_jax.families.strict_json import shown

# transformers' defaults of fields that a file may lack.
_TOP_K, _INDEX_SIZE, _N_DENSE, _N_SHARED, _MULTIPLIER = 2048, 128, 3, 1, 2.5
_GLM_EPS, _GLM_QUERY_RANK = 1e-5, 2048

_DENSE, _SPARSE = "dense", "sparse"  # a layer's kind in `mlp_layer_types`
_INDEXED = "indexed_attention"  # in `layer_types`
_FULL, _SHARED = "full", "shared"  # in `indexer_types`

# What a file must say of experts even if no layer has them.
_UNUSED_EXPERTS = dict.fromkeys(
    ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group"), 1
)

_INDEXER = "{prefix}layers.{i}.self_attn.indexer."
_WEIGHTS: Mapping[str, StoredName] = {
    **deepseek.WEIGHTS,
    "layers.{i}.index_q.weight": as_it_is(f"{_INDEXER}wq_b.weight"),
    "layers.{i}.index_k.weight": as_it_is(f"{_INDEXER}wk.weight"),
    "layers.{i}.index_k_norm.scale": as_it_is(f"{_INDEXER}k_norm.weight"),
    "layers.{i}.index_k_norm.bias": as_it_is(f"{_INDEXER}k_norm.bias"),
    "layers.{i}.index_weights.weight": as_it_is(f"{_INDEXER}weights_proj.weight"),
}
_CONFIG_NAMES: Mapping[str, str] = {
    **deepseek.CONFIG_NAMES,
    "index_n_heads": "index_n_heads",
    "index_head_size": "index_head_dim",
    "index_top_k": "index_topk",
}


def _read_v32(fields: ConfigFields) -> ModelConfig:
    experts = read_corrected_experts(fields, multiplier=_MULTIPLIER, n_groups=8, top_groups=4)
    return deepseek.read_latent_decoder(
        fields,
        experts,
        _sparse_layers(fields),
        interleaved=True,
        n_shared=_N_SHARED,
        indexer=_read_indexer(fields, n_heads=64, interleaved=False),
    )


def _read_glm(fields: ConfigFields) -> ModelConfig:
    return deepseek.read_latent_decoder(
        fields,
        read_corrected_experts(fields, multiplier=_MULTIPLIER),
        _sparse_layers(fields),
        interleaved=True,
        eps=_GLM_EPS,
        query_rank=_GLM_QUERY_RANK,
        n_shared=_N_SHARED,
        indexer=_read_indexer(fields, n_heads=32, interleaved=True),
        shares=_shared_indexers(fields),
    )


def _read_indexer(fields: ConfigFields, *, n_heads: int, interleaved: bool) -> Indexer:
    """Read an indexer; `n_heads` and `interleaved` are the family's. Raises UnsupportedModel."""
    fields.must_be("rope_interleave", True, "rotary pairs of attention that are halves of a head")
    pairs = "halves of a key" if interleaved else "interleaved"
    fields.must_be("indexer_rope_interleave", interleaved, f"rotary pairs of index keys that are {pairs}")
    kinds = fields.texts("layer_types") or ()
    if not set(kinds) <= {_INDEXED}:
        raise UnsupportedModel(
            f"{shown(fields.path)}: layer_types: only {_INDEXED} is supported, found {shown(list(kinds))}"
        )
    return Indexer(
        n_heads=fields.whole("index_n_heads", default=n_heads),
        head_size=fields.whole("index_head_dim", default=_INDEX_SIZE),
        top_k=fields.whole("index_topk", default=_TOP_K),
        interleaved=interleaved,
    )


def _shared_indexers(fields: ConfigFields) -> list[bool]:
    """Read which layers take the keys that an earlier layer selected. Raises BadModelConfig."""
    n_layers = read_n_layers(fields)
    kinds, pattern = fields.texts("indexer_types"), fields.raw("index_topk_pattern")
    every, first = (
        fields.whole("index_topk_freq", default=1),
        fields.whole("index_skip_topk_offset", default=2),
    )
    if kinds is None and isinstance(pattern, str):
        kinds = tuple({"F": _FULL, "S": _SHARED}.get(letter, letter) for letter in pattern)
    elif kinds is None and pattern is not None:
        kinds = fields.texts("index_topk_pattern")
    if kinds is None:
        return [max(i - first + 1, 0) % max(every, 1) != 0 for i in range(n_layers)]
    if len(kinds) != n_layers or not set(kinds) <= {_FULL, _SHARED} or kinds[0] == _SHARED:
        raise BadModelConfig(
            f"{shown(fields.path)}: indexer_types: expected {n_layers} of {_FULL}, {_SHARED}, the first "
            f"{_FULL}, found {shown(list(kinds))}"
        )
    return [kind == _SHARED for kind in kinds]


def _sparse_layers(fields: ConfigFields) -> list[bool]:
    """Read which layers have experts: mlp_layer_types, or else first_k_dense_replace."""
    n_layers = read_n_layers(fields)
    if (every := fields.whole("moe_layer_freq", default=1)) != 1:
        raise UnsupportedModel(
            f"{shown(fields.path)}: moe_layer_freq is {every}; only 1 is supported in this family, whose "
            "mlp_layer_types has the layers with experts"
        )
    first = fields.whole("first_k_dense_replace", default=_N_DENSE)
    kinds = fields.texts("mlp_layer_types")
    if kinds is None:
        return [i >= first for i in range(n_layers)]
    if len(kinds) != n_layers or not set(kinds) <= {_DENSE, _SPARSE}:
        raise BadModelConfig(
            f"{shown(fields.path)}: mlp_layer_types: expected {n_layers} of {_DENSE}, {_SPARSE}, "
            f"found {shown(list(kinds))}"
        )
    return [kind == _SPARSE for kind in kinds]


def _write(model: ModelConfig) -> dict[str, Any] | None:
    unused = {"intermediate_size": model.feed_forward.size, **_UNUSED_EXPERTS}
    written, indexer = deepseek.latent_fields(model, without_experts=unused), model.attention.indexer
    if written is None or indexer is None:
        return None
    experts = [layer.experts for layer in model.layers]
    return written | {
        "mlp_layer_types": [_DENSE if each is None else _SPARSE for each in experts],
        "index_n_heads": indexer.n_heads,
        "index_head_dim": indexer.head_size,
        "index_topk": indexer.top_k,
    }


def _write_glm(model: ModelConfig) -> dict[str, Any] | None:
    written, kinds = _write(model), [attention.indexer for attention in model.attentions]
    shared = [_SHARED if each is not None and each.shared else _FULL for each in kinds]
    return written and written | {"indexer_types": shared}


def _family(model_type: str, title: str, classes: str, **other: Any) -> Family:
    return relative(
        model_type=model_type,
        title=title,
        architectures=(f"{classes}ForCausalLM", f"{classes}Model"),
        config_names=_CONFIG_NAMES,
        weights=_WEIGHTS,
        alternatives=FUSED,
        unread={**deepseek.UNREAD, "index_share_for_mtp_iteration": "the layers that predict further tokens"},
        further=AFTER_LAST,
        **other,
    )


DEEPSEEK_V32 = _family("deepseek_v32", "DeepSeek-V3.2", "DeepseekV32", read=_read_v32, write=_write)
GLM_MOE_DSA = _family("glm_moe_dsa", "GLM-5", "GlmMoeDsa", read=_read_glm, write=_write_glm)
