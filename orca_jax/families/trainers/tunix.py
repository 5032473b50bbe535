"""The arrays of Tunix's models, which are Flax nnx modules: Llama, Qwen 2 and 3, Qwen 3 MoE, Gemma 1 to 3.

Gemma's arrays have heads before the hidden size, and one array for keys and values, or where there are as
many K/V heads as query heads for queries too. Experts are the first axis of their arrays, whose names lack
"kernel".
"""

from collections.abc import Mapping

from orca_jax.errors import UnsupportedModel
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.stored_name import StoredName
from orca_jax.families.trainers.array_form import ArrayForm
from orca_jax.families.trainers.names import (
    array,
    arrays,
    gemma_heads,
    is_gemma,
    mixture_of,
    queries_keys_values,
)


def tunix_names(model: ModelConfig) -> dict[str, StoredName]:
    """The arrays of each weight. Raises UnsupportedModel."""
    if mixture_of(model, "tunix") not in (None, "qwen3_moe"):
        raise UnsupportedModel("tunix is known for one mixture of experts alone, Qwen 3 MoE")
    norm = "scale" if is_gemma(model) else "w"
    names = {
        "token_embedding": array("embedder.input_embedding", "V H"),
        "final_norm.scale": array(f"final_norm.{norm}", "H"),
        "head.weight": array("lm_head.w", "H V"),
    }
    for i in range(model.n_layers):
        layer = _gemma_layer(model) if is_gemma(model) else _LLAMA_LAYER
        for name, stored in layer.items():
            names[f"layers.{i}.{name}"] = stored.in_layer(str(i))
    return names


_ATTENTION, _MLP = "layers.{i}.attn.", "layers.{i}.mlp."
_FEED_FORWARD: Mapping[str, StoredName] = {
    "up.weight": arrays((f"{_MLP}gate_proj.kernel", "H F"), (f"{_MLP}up_proj.kernel", "H F")),
    "down.weight": array(f"{_MLP}down_proj.kernel", "F H"),
}
_EXPERTS: Mapping[str, StoredName] = {
    "router.weight": array(f"{_MLP}router.kernel", "H X"),
    "experts.up.weight": arrays((f"{_MLP}gate_proj", "X H F"), (f"{_MLP}up_proj", "X H F")),
    "experts.down.weight": array(f"{_MLP}down_proj", "X F H"),
}
_LLAMA_LAYER: Mapping[str, StoredName] = {
    **_FEED_FORWARD,
    **_EXPERTS,
    "qkv.weight": queries_keys_values(
        (f"{_ATTENTION}q_proj.w", ArrayForm("H N D")),
        (f"{_ATTENTION}k_proj.w", ArrayForm("H K D")),
        (f"{_ATTENTION}v_proj.w", ArrayForm("H K D")),
    ),
    "qkv.bias": queries_keys_values(
        (f"{_ATTENTION}q_bias", ArrayForm("ND")),
        (f"{_ATTENTION}k_bias", ArrayForm("KD")),
        (f"{_ATTENTION}v_bias", ArrayForm("KD")),
    ),
    "out.weight": array(f"{_ATTENTION}o_proj.w", "N D H", heads="queries"),
    "q_norm.scale": array(f"{_ATTENTION}q_norm.w", "D"),
    "k_norm.scale": array(f"{_ATTENTION}k_norm.w", "D"),
    "attn_norm.scale": array("layers.{i}.input_layernorm.w", "H"),
    "mlp_norm.scale": array("layers.{i}.post_attention_layernorm.w", "H"),
}


def _gemma_layer(model: ModelConfig) -> dict[str, StoredName]:
    after = "post_attn_norm" if model.attention.qk_norm is None else "post_attention_norm"
    return {
        **_FEED_FORWARD,
        **gemma_heads(model, _ATTENTION),
        "attn_norm.scale": array("layers.{i}.pre_attention_norm.scale", "H"),
        "attn_out_norm.scale": array(f"layers.{{i}}.{after}.scale", "H"),
        "mlp_norm.scale": array("layers.{i}.pre_ffw_norm.scale", "H"),
        "mlp_out_norm.scale": array("layers.{i}.post_ffw_norm.scale", "H"),
    }
