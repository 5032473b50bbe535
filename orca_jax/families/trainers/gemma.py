"""The arrays of Gemma's own code (google-deepmind/gemma), Gemma 1 to 3.

Names are those of its Flax modules, which `save_params` writes: "layer_0.attn.q_einsum.w". The checkpoints
that Google published have the same arrays under "transformer/layer_0/attn/q_einsum" and "w".
"""

from collections.abc import Mapping

from orca_jax.families.model_config import ModelConfig
from orca_jax.families.stored_name import StoredName
from orca_jax.families.trainers.array_form import ArrayForm
from orca_jax.families.trainers.names import array, gemma_heads

# Gemma 1 and the 2B of Gemma 2 have gate and up as [hidden, feed-forward], the others the other way round.
_GATE_UP = {True: "2 H F | 2 F H", False: "2 F H | 2 H F"}
_HIDDEN_OF_GEMMA2_2B = 2304
_NORMS: Mapping[str, str] = {
    "attn_norm": "pre_attention_norm",
    "attn_out_norm": "post_attention_norm",
    "mlp_norm": "pre_ffw_norm",
    "mlp_out_norm": "post_ffw_norm",
}


def gemma_names(model: ModelConfig) -> dict[str, StoredName]:
    """The arrays of each weight."""
    names = {
        "token_embedding": array("embedder.input_embedding", "V H"),
        "final_norm.scale": array("final_norm.scale", "H"),
    }
    of_gemma2_2b = model.attention.qk_norm is None and model.hidden_size == _HIDDEN_OF_GEMMA2_2B
    axes = _GATE_UP[of_gemma2_2b or model.layers[0].residual == "pre"]
    gate_up = tuple(ArrayForm(axes, part=part) for part in range(2))
    for i in range(model.n_layers):
        place = f"layer_{i}."
        layer = {
            **gemma_heads(model, f"{place}attn."),
            "up.weight": StoredName((f"{place}mlp.gating_einsum",) * 2, forms=gate_up),
            "down.weight": array(f"{place}mlp.linear", "F H"),
            **{f"{name}.scale": array(f"{place}{norm}.scale", "H") for name, norm in _NORMS.items()},
        }
        names |= {f"layers.{i}.{name}": stored for name, stored in layer.items()}
    return names


def published(name: str) -> str:
    """Turn an array's name in `gemma_names` into its name in a checkpoint that Google published."""
    *path, last = name.split(".")
    if path and path[-1] == "mlp":
        path, last = [*path, last], "w"
    return ".".join(("/".join(("transformer", *path)), last))
