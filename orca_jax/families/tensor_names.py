"""Which tensors of a Hugging Face checkpoint make up which of our parameters."""

import re
from dataclasses import dataclass

from orca_jax.families.hf_config import ModelType


@dataclass(frozen=True, slots=True)
class Source:
    """The tensors of one parameter, one above the other along its first axis, transposed where it says so."""

    names: tuple[str, ...]
    transpose: bool = False


# Where the decoder's own tensors may stand: a causal language model, or the bare decoder saved alone.
PREFIXES: dict[ModelType, tuple[str, ...]] = {
    "gpt2": ("transformer.", ""),
    "opt": ("model.decoder.", "decoder."),
}
HEAD = "lm_head.weight"
# Not weights: GPT-2's causal mask and the number it masks with, which old versions saved.
_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")

_OUTSIDE: dict[ModelType, dict[str, str]] = {
    "gpt2": {
        "token_embedding": "wte.weight",
        "position_embedding": "wpe.weight",
        "final_norm": "ln_f",
    },
    "opt": {
        "token_embedding": "embed_tokens.weight",
        "position_embedding": "embed_positions.weight",
        "project_in": "project_in.weight",
        "project_out": "project_out.weight",
        "final_norm": "final_layer_norm",
    },
}
_LAYER: dict[ModelType, dict[str, tuple[str, ...]]] = {
    "gpt2": {
        "attn_norm": ("ln_1",),
        "qkv": ("attn.c_attn",),
        "out": ("attn.c_proj",),
        "mlp_norm": ("ln_2",),
        "up": ("mlp.c_fc",),
        "down": ("mlp.c_proj",),
    },
    "opt": {
        "attn_norm": ("self_attn_layer_norm",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "out": ("self_attn.out_proj",),
        "mlp_norm": ("final_layer_norm",),  # of the layer, whatever the name suggests
        "up": ("fc1",),
        "down": ("fc2",),
    },
}
_LAYER_LIST: dict[ModelType, str] = {"gpt2": "h", "opt": "layers"}


def source(parameter: str, model_type: ModelType, prefix: str) -> Source:
    """The tensors of `parameter`, a name of `orca_jax.model.gpt.parameter_shapes`."""
    outside = _OUTSIDE[model_type]
    if parameter == "head.weight":
        return Source((HEAD,))
    if parameter in outside:
        return Source((prefix + outside[parameter],))
    module, leaf = parameter.rsplit(".", 1)
    hf_leaf = "bias" if leaf == "bias" else "weight"
    if module in outside:
        return Source((f"{prefix}{outside[module]}.{hf_leaf}",))
    _, layer, module = module.split(".")
    names = tuple(
        f"{prefix}{_LAYER_LIST[model_type]}.{layer}.{name}.{hf_leaf}" for name in _LAYER[model_type][module]
    )
    # GPT-2's layers are Conv1D, stored [in, out]; ours, as OPT's, are [out, in].
    return Source(names, transpose=model_type == "gpt2" and leaf == "weight")


def is_buffer(name: str, model_type: ModelType, prefix: str) -> bool:
    """Whether a tensor is known to be no weight, and is passed over."""
    return model_type == "gpt2" and _BUFFERS.fullmatch(name.removeprefix(prefix)) is not None


def layer_number(name: str, model_type: ModelType, prefix: str) -> int | None:
    """The layer that a tensor belongs to by its name, if any."""
    found = re.match(rf"{_LAYER_LIST[model_type]}\.(\d{{1,9}})\.", name.removeprefix(prefix))
    return int(found[1]) if found else None
