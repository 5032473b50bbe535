"""The arrays of Levanter's models, which are Haliax modules: Llama, Mistral, Qwen 2 and 3, Mixtral, Gemma.

Arrays have the output axes first, and queries an axis for K/V heads and one for the queries of each. The
first axis of an array counts layers ("transformer.layers.stacked.mlp.up_proj.weight"); without `scan_layers`
each layer has arrays of its own ("transformer.layers.blocks.0.mlp.up_proj.weight").
"""

from dataclasses import replace

from orca_jax.errors import UnsupportedModel
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.stored_name import StoredName
from orca_jax.families.trainers.array_form import ArrayForm
from orca_jax.families.trainers.names import array, arrays, is_gemma, mixture_of, queries_keys_values

FLAG = ".inference"  # of modules that compute otherwise in training: saved as an array, and no weight


def levanter_names(model: ModelConfig, *, stacked: bool) -> dict[str, StoredName]:
    """The arrays of each weight. Raises UnsupportedModel."""
    if mixture_of(model, "levanter") not in (None, "mixtral"):
        raise UnsupportedModel("levanter is known for one mixture of experts alone, Mixtral")
    names = {
        "token_embedding": array("embeddings.token_embeddings.weight", "V H"),
        "final_norm.scale": array("transformer.norm.weight", "H"),
        "head.weight": array("lm_head.weight", "V H"),
    }
    layer = {**_LAYER, **(_NORMS_AROUND if model.layers[0].residual == "both" else _NORMS_BEFORE)}
    for i in range(model.n_layers):
        place = "transformer.layers.stacked." if stacked else f"transformer.layers.blocks.{i}."
        for name, stored in layer.items():
            forms = stored.forms
            if stacked:
                forms = tuple(
                    replace(form, axes=f"L {form.axes}", layer=i, n_layers=model.n_layers) for form in forms
                )
            theirs = tuple(place + each for each in stored.names)
            names[f"layers.{i}.{name}"] = replace(stored, names=theirs, forms=forms)
    return names if is_gemma(model) or model.layers[0].residual == "pre" else {}


_ATTENTION, _EXPERTS = "self_attn.", "block_sparse_moe."
_LAYER: dict[str, StoredName] = {
    "qkv.weight": queries_keys_values(
        (f"{_ATTENTION}q_proj.weight", ArrayForm("K G D H")),
        (f"{_ATTENTION}k_proj.weight", ArrayForm("K D H")),
        (f"{_ATTENTION}v_proj.weight", ArrayForm("K D H")),
    ),
    "qkv.bias": queries_keys_values(
        (f"{_ATTENTION}q_proj.bias", ArrayForm("K G D")),
        (f"{_ATTENTION}k_proj.bias", ArrayForm("K D")),
        (f"{_ATTENTION}v_proj.bias", ArrayForm("K D")),
    ),
    "out.weight": array(f"{_ATTENTION}o_proj.weight", "H N D", heads="queries"),
    "q_norm.scale": array(f"{_ATTENTION}q_norm.weight", "D"),
    "k_norm.scale": array(f"{_ATTENTION}k_norm.weight", "D"),
    "up.weight": arrays(("mlp.gate_proj.weight", "F H"), ("mlp.up_proj.weight", "F H")),
    "down.weight": array("mlp.down_proj.weight", "H F"),
    "router.weight": array(f"{_EXPERTS}gate.weight", "X H"),
    "experts.up.weight": arrays(
        (f"{_EXPERTS}experts.w1.weight", "X H F"), (f"{_EXPERTS}experts.w3.weight", "X H F")
    ),
    "experts.down.weight": array(f"{_EXPERTS}experts.w2.weight", "X F H"),
}
_NORMS_BEFORE = {
    "attn_norm.scale": array("input_layernorm.weight", "H"),
    "mlp_norm.scale": array("post_attention_layernorm.weight", "H"),
}
_NORMS_AROUND = {
    "attn_norm.scale": array("input_layernorm.weight", "H"),
    "attn_out_norm.scale": array("post_attention_layernorm.weight", "H"),
    "mlp_norm.scale": array("pre_feedforward_layernorm.weight", "H"),
    "mlp_out_norm.scale": array("post_feedforward_layernorm.weight", "H"),
}
