"""What MaxText's mixtures of experts have beside other decoders: blocks of experts, and latent attention.

Experts are the first axis of their arrays, before that of scanned layers: [X, H, F], or [X, L, H, F]. Those
of DeepSeek are in "moe_layers", counted apart from the "dense_layers" before them; gpt-oss scans pairs of
layers, one with a window and one without. DeepSeek's pairs of rotated elements are where Hugging Face's
checkpoints have them.
"""

from orca_jax.errors import UnsupportedModel
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.stored_name import StoredName
from orca_jax.families.trainers.mixtures import Mixture
from orca_jax.families.trainers.names import array, arrays

_GPT_OSS_GROUP = 2  # layers that MaxText scans together
_BLOCK: dict[Mixture, str] = {
    "mixtral": "MoeBlock_0",
    "qwen3_moe": "moe_block",
    "gpt_oss": "GptOssMlp",
    "deepseek": "DeepSeekMoeBlock_0.MoeBlock_0",
}
_SHARED = "DeepSeekMoeBlock_0.shared_experts"


def expert_arrays(mixture: Mixture) -> dict[str, StoredName]:
    """The arrays of a layer's experts and of its router."""
    block = _BLOCK[mixture]
    router_bias = "router.correction" if mixture == "deepseek" else "router.bias"
    return {
        "router.weight": array(f"{block}.gate.kernel", "H X"),
        router_bias: array(f"{block}.gate.bias", "X"),
        "experts.up.weight": arrays((f"{block}.wi_0", "X H F"), (f"{block}.wi_1", "X H F")),
        "experts.up.bias": arrays((f"{block}.wi_0_bias", "X F"), (f"{block}.wi_1_bias", "X F")),
        "experts.down.weight": array(f"{block}.wo", "X F H"),
        "experts.down.bias": array(f"{block}.wo_bias", "X H"),
        "shared.up.weight": arrays((f"{_SHARED}.wi_0.kernel", "H S"), (f"{_SHARED}.wi_1.kernel", "H S")),
        "shared.down.weight": array(f"{_SHARED}.wo.kernel", "S H"),
    }


def latent_arrays(place: str) -> dict[str, StoredName]:
    """The arrays of latent attention, whose names begin with `place`."""
    return {
        "q.weight": array(f"{place}.query.kernel", "H N Q"),
        "q_a.weight": array(f"{place}.wq_a.kernel", "H A"),
        "q_a_norm.scale": array(f"{place}.q_norm.scale", "A"),
        "q_b.weight": array(f"{place}.wq_b.kernel", "A N Q"),
        "kv_a.weight": array(f"{place}.wkv_a.kernel", "H R"),
        "kv_a_norm.scale": array(f"{place}.kv_norm.scale", "C"),
        "kv_b.weight": array(f"{place}.wkv_b.kernel", "C N M"),
        "out.weight": array(f"{place}.out.kernel", "N W H"),
    }


def place_of_layer(model: ModelConfig, mixture: Mixture, i: int, *, scanned: bool) -> tuple[str, int, int]:
    """Where layer `i` is: the beginning of its names, and layer of layers; of none where it has its own."""
    if mixture == "deepseek":
        n_dense = sum(layer.feed_forward.experts is None for layer in model.layers)
        kind, number, n_layers = "dense_layers", i, n_dense
        if i >= n_dense:
            kind, number, n_layers = "moe_layers", i - n_dense, model.n_layers - n_dense
        return (f"decoder.{kind}.", number, n_layers) if scanned else (f"decoder.{kind}_{number}.", 0, 0)
    if not scanned:
        return f"decoder.layers_{i}.", 0, 0
    if mixture == "gpt_oss":
        n_groups, left = divmod(model.n_layers, _GPT_OSS_GROUP)
        if left:
            raise UnsupportedModel(
                f"maxtext-scanned has layers of gpt-oss in groups of {_GPT_OSS_GROUP}, and this model has "
                f"{model.n_layers}; use maxtext"
            )
        group, within = divmod(i, _GPT_OSS_GROUP)
        return f"decoder.layers.layers_{within}.", group, n_groups
    return "decoder.layers.", i, model.n_layers
