"""OPT (Zhang et al., 2022). OPT-350m has norms after each part, and projections around its layers."""

from typing import Any

from orca_jax.errors import ConfigError
from orca_jax.families.config_fields import HF_ACTIVATIONS, ConfigFields, general_fields
from orca_jax.families.family import Family
from orca_jax.families.gpt_config import flat_options, gpt_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.stored_name import as_it_is, stacked

_EPS = 1e-5  # config.json does not say it
_POSITION_OFFSET = 2


def _read(fields: ConfigFields) -> ModelConfig:
    fields.must_be("layer_norm_elementwise_affine", True, "LayerNorm without weights")
    hidden_size = fields.whole("hidden_size")
    embedding_size = fields.whole("word_embed_proj_dim", default=hidden_size)
    if embedding_size < 1:  # 0 would mean the hidden size
        raise ConfigError(f"embedding_size is {embedding_size}; it must be at least 1")
    norm_first = fields.flag("do_layer_norm_before", True)
    return gpt_config(
        vocab_size=fields.whole("vocab_size"),
        n_positions=fields.whole("max_position_embeddings"),
        hidden_size=hidden_size,
        n_layers=fields.whole("num_hidden_layers"),
        n_heads=fields.whole("num_attention_heads"),
        ffn_size=fields.whole("ffn_dim"),
        activation=fields.activation("activation_function", "relu"),
        norm="pre" if norm_first else "post",
        final_norm=norm_first and not fields.flag("_remove_final_layer_norm", False),
        layer_norm_eps=_EPS,
        use_bias=fields.flag("enable_bias", True),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        position_offset=_POSITION_OFFSET,
        embedding_size=embedding_size,
        **fields.special_ids(),
    )


def _write(model: ModelConfig) -> dict[str, Any] | None:
    options = flat_options(model)
    if options is None or options["position_offset"] != _POSITION_OFFSET or options["layer_norm_eps"] != _EPS:
        return None
    norm_first = options["norm"] == "pre"
    if options["final_norm"] and not norm_first:
        return None
    return general_fields(model) | {
        "max_position_embeddings": model.n_positions,
        "hidden_size": model.hidden_size,
        "word_embed_proj_dim": model.embedding.size,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "ffn_dim": options["ffn_size"],
        "activation_function": HF_ACTIVATIONS[options["activation"]],
        "do_layer_norm_before": norm_first,
        "_remove_final_layer_norm": norm_first and not options["final_norm"],
        "enable_bias": options["use_bias"],
    }


def _qkv(leaf: str) -> tuple[str, ...]:
    return tuple(f"{{prefix}}layers.{{i}}.self_attn.{part}_proj.{leaf}" for part in "qkv")


OPT = Family(
    model_type="opt",
    title="OPT",
    architectures=("OPTForCausalLM", "OPTModel"),
    config_names={
        "n_positions": "max_position_embeddings",
        "embedding_size": "word_embed_proj_dim",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "ffn_size": "ffn_dim",
    },
    read=_read,
    write=_write,
    prefixes=("model.decoder.", "decoder."),
    weights={
        "token_embedding": as_it_is("{prefix}embed_tokens.weight"),
        "position_embedding": as_it_is("{prefix}embed_positions.weight"),
        "project_in": as_it_is("{prefix}project_in.weight"),
        "project_out": as_it_is("{prefix}project_out.weight"),
        "layers.{i}.qkv.weight": stacked(*_qkv("weight")),
        "layers.{i}.qkv.bias": stacked(*_qkv("bias")),
        "layers.{i}.out.weight": as_it_is("{prefix}layers.{i}.self_attn.out_proj.weight"),
        "layers.{i}.out.bias": as_it_is("{prefix}layers.{i}.self_attn.out_proj.bias"),
        "layers.{i}.up.weight": as_it_is("{prefix}layers.{i}.fc1.weight"),
        "layers.{i}.up.bias": as_it_is("{prefix}layers.{i}.fc1.bias"),
        "layers.{i}.down.weight": as_it_is("{prefix}layers.{i}.fc2.weight"),
        "layers.{i}.down.bias": as_it_is("{prefix}layers.{i}.fc2.bias"),
        "layers.{i}.attn_norm.scale": as_it_is("{prefix}layers.{i}.self_attn_layer_norm.weight"),
        "layers.{i}.attn_norm.bias": as_it_is("{prefix}layers.{i}.self_attn_layer_norm.bias"),
        # Of the layer, whatever the name suggests.
        "layers.{i}.mlp_norm.scale": as_it_is("{prefix}layers.{i}.final_layer_norm.weight"),
        "layers.{i}.mlp_norm.bias": as_it_is("{prefix}layers.{i}.final_layer_norm.bias"),
        "final_norm.scale": as_it_is("{prefix}final_layer_norm.weight"),
        "final_norm.bias": as_it_is("{prefix}final_layer_norm.bias"),
        "head.weight": as_it_is("lm_head.weight"),
    },
)
