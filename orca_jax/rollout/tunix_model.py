"""Translates the config of a Tunix model to the fields of a config.json.

It does not import Tunix, and reads the config by its attributes.
"""

from typing import Any

from orca_jax.errors import NotSupported

# Tunix's Llama 3 and Qwen 3 rotate with this, whatever their config's rope_theta says (0.1.7).
_ROPE_THETA = 1_000_000
# And its Gemma 1 and 2 with this, while Gemma's norms have this epsilon.
_GEMMA_ROPE_THETA, _GEMMA_EPS = 10_000, 1e-6

# By the module of the Tunix model, whose "gemma" is both Gemma 1 and Gemma 2.
_MODEL_TYPES = {"llama3": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_KINDS = {"GLOBAL": "full_attention", "LOCAL_SLIDING": "sliding_attention"}


def config_fields(model: Any, n_positions: int) -> dict[str, Any]:
    """The fields of config.json for a Tunix model that is used with `n_positions` positions.

    Raises NotSupported for a model other than Llama 3, Qwen 2, Qwen 3, and Gemma for text.
    """
    # A model with adapters has a class of Qwix's, which is derived from Tunix's.
    modules = {each.__module__ for each in type(model).__mro__}
    families = [*_MODEL_TYPES, "gemma", "gemma3"]
    family = next((name for name in families if any(m.endswith(f".{name}.model") for m in modules)), None)
    config = getattr(model, "config", None)
    if (
        family is None
        or (family != "qwen3" and getattr(config, "num_experts", None))
        or getattr(config, "vision_config", None) is not None
    ):
        raise NotSupported(
            f"the rollout model is {type(model).__module__}.{type(model).__name__}; it must be Tunix's "
            "Llama3, Qwen2, Qwen3, Gemma, or a Gemma3 without vision",
            param="rollout_actor",
        )
    assert config is not None
    shared = {
        "hidden_size": config.embed_dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": n_positions,
    }
    if family in _MODEL_TYPES:
        tied = getattr(config, "weight_tying", None)
        fields = {
            "model_type": _MODEL_TYPES[family],
            "vocab_size": config.vocab_size,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": float(config.rope_theta if family == "qwen2" else _ROPE_THETA),
            "tie_word_embeddings": bool(config.use_tied_embedding if tied is None else tied),
            "hidden_act": "silu",
        }
        return shared | fields | _experts_fields(config)
    shared |= {
        "vocab_size": config.num_embed,
        "rms_norm_eps": _GEMMA_EPS,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": config.sliding_window_size,
        "layer_types": [_KINDS[layer.attn.attn_type.name] for layer in model.layers],
    }
    return shared | (_gemma3_fields(config) if family == "gemma3" else _gemma_fields(config, shared))


def _experts_fields(config: Any) -> dict[str, Any]:
    if not getattr(config, "num_experts", None):
        return {}
    return {
        "model_type": "qwen3_moe",
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.hidden_dim,
        "norm_topk_prob": True,
    }


def _gemma_fields(config: Any, shared: dict[str, Any]) -> dict[str, Any]:
    rotary = {"rope_theta": _GEMMA_ROPE_THETA}
    if config.use_post_attn_norm and config.use_post_ffw_norm:
        return rotary | {
            "model_type": "gemma2",
            "query_pre_attn_scalar": config.head_dim,
            "attn_logit_softcapping": config.attn_logits_soft_cap,
            "final_logit_softcapping": config.final_logit_softcap,
        }
    caps = (config.attn_logits_soft_cap, config.final_logit_softcap)
    if (
        config.use_post_attn_norm
        or config.use_post_ffw_norm
        or caps != (None, None)
        or "sliding_attention" in shared["layer_types"]
    ):
        raise NotSupported(
            "the rollout model is neither Gemma 1 nor Gemma 2: it must have all of the norms after attention "
            "and feed-forward, or none of these, soft caps and windows",
            param="rollout_actor",
        )
    return rotary | {"model_type": "gemma", "layer_types": None, "sliding_window": None}


def _gemma3_fields(config: Any) -> dict[str, Any]:
    by_head = config.query_pre_attn_norm.name == "BY_ONE_OVER_SQRT_HEAD_DIM"

    def rotary(base: float, factor: float) -> dict[str, Any]:
        scaling = (
            {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": float(factor)}
        )
        return {"rope_theta": float(base), **scaling}

    return {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": config.head_dim if by_head else config.embed_dim // config.num_heads,
        "rope_parameters": {
            "full_attention": rotary(config.global_base_frequency, config.global_scale_factor),
            "sliding_attention": rotary(config.local_base_frequency, config.local_scale_factor),
        },
    }
