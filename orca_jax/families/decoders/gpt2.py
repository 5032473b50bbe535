"""GPT-2 (Radford et al., 2019)."""

from typing import Any

from orca_jax.families.config_fields import HF_ACTIVATIONS, ConfigFields, general_fields
from orca_jax.families.family import Family
from orca_jax.families.gpt_config import flat_options, gpt_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.stored_name import as_it_is, transposed


def _read(fields: ConfigFields) -> ModelConfig:
    fields.must_be("scale_attn_weights", True, "attention without the scale of 1 / sqrt(head size)")
    fields.must_be("scale_attn_by_inverse_layer_idx", False, "attention scaled by the layer's number")
    fields.must_be("add_cross_attention", False, "cross attention")
    hidden_size = fields.whole("n_embd", "hidden_size")
    return gpt_config(
        vocab_size=fields.whole("vocab_size"),
        n_positions=fields.whole("n_positions", "max_position_embeddings"),
        hidden_size=hidden_size,
        n_layers=fields.whole("n_layer", "num_hidden_layers"),
        n_heads=fields.whole("n_head", "num_attention_heads"),
        ffn_size=fields.whole("n_inner", default=4 * hidden_size),
        activation=fields.activation("activation_function", "gelu_new"),
        layer_norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        **fields.special_ids(),
    )


def _write(model: ModelConfig) -> dict[str, Any] | None:
    options = flat_options(model)
    if options is None or not (options["norm"] == "pre" and options["final_norm"] and options["use_bias"]):
        return None
    if options["position_offset"] != 0 or model.embedding.size != model.hidden_size:
        return None
    return general_fields(model) | {
        "n_positions": model.n_positions,
        "n_embd": model.hidden_size,
        "n_layer": model.n_layers,
        "n_head": model.n_heads,
        "n_inner": options["ffn_size"],
        "activation_function": HF_ACTIVATIONS[options["activation"]],
        "layer_norm_epsilon": options["layer_norm_eps"],
    }


# Its linear layers are Conv1D, whose weights are [in, out].
GPT2 = Family(
    model_type="gpt2",
    title="GPT-2",
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    config_names={
        "hidden_size": "n_embd",
        "embedding_size": "n_embd",
        "n_layers": "n_layer",
        "n_heads": "n_head",
        "ffn_size": "n_inner",
        "norm_eps": "layer_norm_epsilon",
    },
    read=_read,
    write=_write,
    prefixes=("transformer.", ""),
    weights={
        "token_embedding": as_it_is("{prefix}wte.weight"),
        "position_embedding": as_it_is("{prefix}wpe.weight"),
        "layers.{i}.qkv.weight": transposed("{prefix}h.{i}.attn.c_attn.weight"),
        "layers.{i}.qkv.bias": as_it_is("{prefix}h.{i}.attn.c_attn.bias"),
        "layers.{i}.out.weight": transposed("{prefix}h.{i}.attn.c_proj.weight"),
        "layers.{i}.out.bias": as_it_is("{prefix}h.{i}.attn.c_proj.bias"),
        "layers.{i}.up.weight": transposed("{prefix}h.{i}.mlp.c_fc.weight"),
        "layers.{i}.up.bias": as_it_is("{prefix}h.{i}.mlp.c_fc.bias"),
        "layers.{i}.down.weight": transposed("{prefix}h.{i}.mlp.c_proj.weight"),
        "layers.{i}.down.bias": as_it_is("{prefix}h.{i}.mlp.c_proj.bias"),
        "layers.{i}.attn_norm.scale": as_it_is("{prefix}h.{i}.ln_1.weight"),
        "layers.{i}.attn_norm.bias": as_it_is("{prefix}h.{i}.ln_1.bias"),
        "layers.{i}.mlp_norm.scale": as_it_is("{prefix}h.{i}.ln_2.weight"),
        "layers.{i}.mlp_norm.bias": as_it_is("{prefix}h.{i}.ln_2.bias"),
        "final_norm.scale": as_it_is("{prefix}ln_f.weight"),
        "final_norm.bias": as_it_is("{prefix}ln_f.bias"),
        "head.weight": as_it_is("lm_head.weight"),
    },
    buffers=r"h\.\d+\.attn\.(bias|masked_bias)",  # the causal mask, which old versions saved
)
