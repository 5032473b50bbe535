"""The fields that EasyDeL adds to a model's config.json: how it shards, schedules and stores a computation.

The model computes the same without them, so they are left out before the family judges the others. What would
change it (`bits`, `quantization_config`, `number_rep_kv` above 1) stays, and is refused where it is set.
"""

from typing import Any

_MARK = "easy_method"
_FIELDS = """
    _external_rope_config_kwargs attn_mechanism attn_dtype attn_softmax_dtype backend blocksize_b
    blocksize_k blocksize_q decode_attn_mechanism easy_method fcm_max_ratio fcm_min_ratio
    flash_attention_backward_pass_impl fsdp_is_ep_bound gradient_checkpointing_targets
    hardware_abstraction kv_cache_sharding_sequence_axis_name kvdtype lmhead_chunksize mla_attn_dtype
    mla_attn_mechanism mla_attn_softmax_dtype moe_force_xla_gmm moe_method moe_tiling_size_batch
    moe_tiling_size_dim moe_tiling_size_seqlen operation_configs pallas_k_block_size pallas_m_block_size
    pallas_n_block_size partition_axis platform precompute_masks qmm_platform_override
    qmm_tpu_path_override scan_attention_layers scan_layers scan_mlp_chunk_size scan_ring_attention
    sequence_axis_name sharding_axis_dims sharding_axis_names sharding_dcn_axis_dims sp_is_ep_bound
    use_expert_tensor_mode use_qmm_best_config use_ring_of_experts use_scan_mlp use_sharded_kv_caching
    use_sharding_constraint
"""
_NAMES = frozenset(_FIELDS.split())
_LAYER_TYPES = ("full_attention", "sliding_attention")


def without_easydel_fields(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config.json without those that EasyDeL adds, where EasyDeL wrote the file."""
    if _MARK not in values:
        return values
    kept = {name: value for name, value in values.items() if name not in _NAMES}
    if kept.get("number_rep_kv") == 1:
        del kept["number_rep_kv"]
    types = kept.get("layer_types")  # it is written for every family
    if types and not kept.get("sliding_window") and set(types) == {"full_attention"}:
        del kept["layer_types"]
    rope = kept.get("rope_parameters")
    if isinstance(rope, dict) and any(kind in rope for kind in _LAYER_TYPES):
        # Each layer type's parameters have those of the types again.
        kept["rope_parameters"] = {
            kind: {name: value for name, value in one.items() if name not in _LAYER_TYPES}
            if isinstance(one, dict)
            else one
            for kind, one in rope.items()
        }
    return kept
