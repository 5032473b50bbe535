"""GPT-2 (Radford et al., 2019)."""

from typing import Any

from orca_jax.families.config_fields import HF_ACTIVATIONS, ConfigFields
from orca_jax.families.decoders.llama_like import decoder, read_older_sizes, size_fields
from orca_jax.families.family import Family
from orca_jax.families.model_config import FeedForward, Layer, LearnedPositions, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.stored_name import as_it_is, layer_norm, linear, transposed

_NAMES = {
    "n_positions": "n_positions",
    "hidden_size": "n_embd",
    "embedding_size": "n_embd",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "ffn_size": "n_inner",
    "norm_eps": "layer_norm_epsilon",
}
_LAYER = "{prefix}h.{i}."


def _read(fields: ConfigFields) -> ModelConfig:
    fields.must_be("scale_attn_weights", True, "attention without the scale of 1 / sqrt(head size)")
    fields.must_be("scale_attn_by_inverse_layer_idx", False, "attention scaled by the layer's number")
    fields.must_be("add_cross_attention", False, "cross attention")
    sizes = read_older_sizes(fields, _NAMES)
    layer = Layer(
        attention=sizes.attention(),
        feed_forward=FeedForward(
            size=fields.whole("n_inner", default=4 * sizes.hidden_size),
            activation=fields.activation("activation_function", "gelu_new"),
        ),
        norm=Norm(eps=fields.number("layer_norm_epsilon", 1e-5)),
    )
    return decoder(fields, sizes, layer, tied=True, positions=LearnedPositions())


def _write(model: ModelConfig) -> dict[str, Any]:
    activation = HF_ACTIVATIONS[model.feed_forward.activation]
    return size_fields(model, _NAMES) | {"activation_function": activation}


GPT2 = Family(
    model_type="gpt2",
    title="GPT-2",
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    config_names=_NAMES,
    read=_read,
    write=_write,
    prefixes=("transformer.", ""),
    weights={  # its linear layers are Conv1D, whose weights are [in, out]
        "token_embedding": as_it_is("{prefix}wte.weight"),
        "position_embedding": as_it_is("{prefix}wpe.weight"),
        **linear("layers.{i}.qkv", f"{_LAYER}attn.c_attn", transposed),
        **linear("layers.{i}.out", f"{_LAYER}attn.c_proj", transposed),
        **linear("layers.{i}.up", f"{_LAYER}mlp.c_fc", transposed),
        **linear("layers.{i}.down", f"{_LAYER}mlp.c_proj", transposed),
        **layer_norm("layers.{i}.attn_norm", f"{_LAYER}ln_1"),
        **layer_norm("layers.{i}.mlp_norm", f"{_LAYER}ln_2"),
        **layer_norm("final_norm", "{prefix}ln_f"),
        "head.weight": as_it_is("lm_head.weight"),
    },
    buffers=r"h\.\d+\.attn\.(bias|masked_bias)",  # the causal mask, which old versions saved
)
