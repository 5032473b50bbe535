"""The arrays of EasyDeL's models: Llama, Mistral, Qwen 2 and 3, Mixtral, Qwen 3 MoE.

Names are those of Hugging Face's modules, with "kernel" for "weight", and matrices are [in, out]. Experts are
the first axis of their arrays. A model with tied embeddings has an array for the head too, but no use for it.
"""

from collections.abc import Mapping

from orca_jax.errors import UnsupportedModel
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.stored_name import StoredName
from orca_jax.families.trainers.array_form import ArrayForm
from orca_jax.families.trainers.names import (
    Mixture,
    array,
    arrays,
    is_gemma,
    mixture_of,
    queries_keys_values,
)

HEAD = "lm_head.kernel"


def easydel_names(model: ModelConfig) -> dict[str, StoredName]:
    """The arrays of each weight. Raises UnsupportedModel."""
    mixture = mixture_of(model, "easydel")
    if mixture not in (None, *_EXPERTS):
        raise UnsupportedModel("easydel is known for two mixtures of experts alone, Mixtral and Qwen 3 MoE")
    if is_gemma(model) or model.layers[0].residual != "pre":
        raise UnsupportedModel(
            "easydel is known for models like Llama alone: its Gemma has other windows and activations; use "
            "safetensors"
        )
    names = {
        "token_embedding": array("model.embed_tokens.embedding", "V H"),
        "final_norm.scale": array("model.norm.kernel", "H"),
        "head.weight": array(HEAD, "H V"),
    }
    layer = {**_LAYER, **(_EXPERTS[mixture] if mixture else {})}
    for i in range(model.n_layers):
        for name, stored in layer.items():
            names[f"layers.{i}.{name}"] = stored.in_layer(str(i))
    return names


_PLACE = "model.layers.{i}."
_ATTENTION, _MLP, _BLOCK = f"{_PLACE}self_attn.", f"{_PLACE}mlp.", f"{_PLACE}block_sparse_moe."
_LAYER: Mapping[str, StoredName] = {
    "qkv.weight": queries_keys_values(
        (f"{_ATTENTION}q_proj.kernel", ArrayForm("H ND")),
        (f"{_ATTENTION}k_proj.kernel", ArrayForm("H KD")),
        (f"{_ATTENTION}v_proj.kernel", ArrayForm("H KD")),
    ),
    "qkv.bias": queries_keys_values(
        (f"{_ATTENTION}q_proj.bias", ArrayForm("ND")),
        (f"{_ATTENTION}k_proj.bias", ArrayForm("KD")),
        (f"{_ATTENTION}v_proj.bias", ArrayForm("KD")),
    ),
    "out.weight": array(f"{_ATTENTION}o_proj.kernel", "ND H", heads="queries"),
    "q_norm.scale": array(f"{_ATTENTION}q_norm.kernel", "D"),
    "k_norm.scale": array(f"{_ATTENTION}k_norm.kernel", "D"),
    "up.weight": arrays((f"{_MLP}gate_proj.kernel", "H F"), (f"{_MLP}up_proj.kernel", "H F")),
    "down.weight": array(f"{_MLP}down_proj.kernel", "F H"),
    "attn_norm.scale": array(f"{_PLACE}input_layernorm.kernel", "H"),
    "mlp_norm.scale": array(f"{_PLACE}post_attention_layernorm.kernel", "H"),
}
_EXPERTS: Mapping[Mixture, Mapping[str, StoredName]] = {
    "mixtral": {
        "router.weight": array(f"{_BLOCK}gate.kernel", "H X"),
        "experts.up.weight": arrays(
            (f"{_BLOCK}experts.w1.kernel", "X H F"), (f"{_BLOCK}experts.w3.kernel", "X H F")
        ),
        "experts.down.weight": array(f"{_BLOCK}experts.w2.kernel", "X F H"),
    },
    "qwen3_moe": {
        "router.weight": array(f"{_MLP}gate.kernel", "H X"),
        "experts.up.weight": arrays(
            (f"{_MLP}experts.gate_proj.kernel", "X H F"), (f"{_MLP}experts.up_proj.kernel", "X H F")
        ),
        "experts.down.weight": array(f"{_MLP}experts.down_proj.kernel", "X F H"),
    },
}
