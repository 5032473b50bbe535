"""OPT (Zhang et al., 2022). OPT-350m norms after attention and feed-forward, and projects in and out."""

from typing import Any

from orca_jax.families.config_fields import HF_ACTIVATIONS, ConfigFields
from orca_jax.families.decoders.llama_like import CONFIG_NAMES, decoder, read_older_sizes, size_fields
from orca_jax.families.family import Family
from orca_jax.families.model_config import Embedding, FeedForward, Layer, LearnedPositions, ModelConfig
from orca_jax.families.stored_name import as_it_is, layer_norm, linear, projections

_NAMES = {
    **{name: CONFIG_NAMES[name] for name in ("n_positions", "n_layers", "n_heads")},
    "embedding_size": "word_embed_proj_dim",
    "ffn_size": "ffn_dim",
}
_LAYER = "{prefix}layers.{i}."


def _read(fields: ConfigFields) -> ModelConfig:
    fields.must_be("layer_norm_elementwise_affine", True, "LayerNorm without weights")
    sizes = read_older_sizes(fields, _NAMES)
    bias = fields.flag("enable_bias", True)
    norm_first = fields.flag("do_layer_norm_before", True)
    layer = Layer(  # with the default epsilon of LayerNorm, which config.json does not say
        attention=sizes.attention(qkv_bias=bias, out_bias=bias),
        feed_forward=FeedForward(
            size=fields.whole("ffn_dim"),
            activation=fields.activation("activation_function", "relu"),
            bias=bias,
        ),
        residual="pre" if norm_first else "post",
    )
    final_norm = norm_first and not fields.flag("_remove_final_layer_norm", False)
    return decoder(
        fields,
        sizes,
        layer,
        embedding=Embedding(
            size=fields.whole("word_embed_proj_dim", default=sizes.hidden_size),
            tied=fields.flag("tie_word_embeddings", True),
        ),
        positions=LearnedPositions(offset=2),
        final_norm=layer.norm if final_norm else None,
    )


def _write(model: ModelConfig) -> dict[str, Any]:
    layer = model.layers[0]
    norm_first = layer.residual == "pre"
    return size_fields(model, _NAMES) | {
        "activation_function": HF_ACTIVATIONS[model.feed_forward.activation],
        "do_layer_norm_before": norm_first,
        "_remove_final_layer_norm": norm_first and model.final_norm is None,
        "enable_bias": model.feed_forward.bias,
    }


OPT = Family(
    model_type="opt",
    title="OPT",
    architectures=("OPTForCausalLM", "OPTModel"),
    config_names=_NAMES,
    read=_read,
    write=_write,
    prefixes=("model.decoder.", "decoder."),
    weights={
        "token_embedding": as_it_is("{prefix}embed_tokens.weight"),
        "position_embedding": as_it_is("{prefix}embed_positions.weight"),
        "project_in": as_it_is("{prefix}project_in.weight"),
        "project_out": as_it_is("{prefix}project_out.weight"),
        **projections("layers.{i}.qkv", f"{_LAYER}self_attn.", "qkv"),
        **linear("layers.{i}.out", f"{_LAYER}self_attn.out_proj"),
        **linear("layers.{i}.up", f"{_LAYER}fc1"),
        **linear("layers.{i}.down", f"{_LAYER}fc2"),
        **layer_norm("layers.{i}.attn_norm", f"{_LAYER}self_attn_layer_norm"),
        **layer_norm(
            "layers.{i}.mlp_norm", f"{_LAYER}final_layer_norm"
        ),  # the norm before the MLP, despite its name
        **layer_norm("final_norm", "{prefix}final_layer_norm"),
        "head.weight": as_it_is("lm_head.weight"),
    },
)
