"""EleutherAI's decoders: GPT-J (Wang & Komatsuzaki, 2021), and GPT-NeoX with Pythia (Black et al., 2022;
Biderman et al., 2023). Both rotate a part of each head; GPT-J has one norm a layer, and a head with bias.
"""

from typing import Any

from orca_jax.errors import BadModelConfig
from orca_jax.families.attention_config import Attention
from orca_jax.families.config_fields import HF_ACTIVATIONS, ConfigFields, general_fields
from orca_jax.families.decoders.llama_like import Sizes, decoder
from orca_jax.families.decoders.rope_fields import read_rotary, rotary_fields
from orca_jax.families.family import Family
from orca_jax.families.limits import even_head_size
from orca_jax.families.model_config import FeedForward, Layer, ModelConfig, alike
from orca_jax.families.norm_config import Norm
from orca_jax.families.rotary import Rotary
from orca_jax.families.stored_name import as_it_is, fused_heads, query_heads, separate_heads
from orca_jax.families.strict_json import shown


def _read_rotary(fields: ConfigFields, head_size: int, n_positions: int) -> Rotary:
    """The rotary positions, whose base and share of a head had names of their own before transformers 5."""
    for old, new in (("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor")):
        if None not in (fields.raw(old), fields.raw(new)) and fields.raw(old) != fields.raw(new):
            raise BadModelConfig(
                f"{shown(fields.path)} disagrees with itself: {old} is {shown(fields.raw(old))}, "
                f"{new} is {shown(fields.raw(new))}"
            )
    return read_rotary(
        fields,
        head_size=head_size,
        n_positions=n_positions,
        default_base=fields.number("rotary_emb_base", 10_000.0),
        partial=fields.number("rotary_pct", 0.25),
    )


def _read_gpt_neox(fields: ConfigFields) -> ModelConfig:
    hidden_size, n_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    sizes = Sizes(
        vocab_size=fields.whole("vocab_size"),
        n_positions=fields.whole("max_position_embeddings"),
        hidden_size=hidden_size,
        n_layers=fields.whole("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_size=even_head_size(hidden_size, n_heads),
    )
    norm = Norm(eps=fields.number("layer_norm_eps", 1e-5))
    bias = fields.flag("attention_bias", True)
    layer = Layer(
        attention=Attention(
            n_heads=n_heads,
            n_kv_heads=n_heads,
            head_size=sizes.head_size,
            qkv_bias=bias,
            out_bias=bias,
            rotary=_read_rotary(fields, sizes.head_size, sizes.n_positions),
        ),
        feed_forward=FeedForward(
            size=fields.whole("intermediate_size"), activation=fields.activation("hidden_act", "gelu")
        ),
        norm=norm,
        residual="parallel_two_norms" if fields.flag("use_parallel_residual", True) else "pre",
    )
    return decoder(fields, sizes, alike(layer, sizes.n_layers), final_norm=norm)


def _write_gpt_neox(model: ModelConfig) -> dict[str, Any] | None:
    layer = model.layers[0]
    rotary = layer.attention.rotary
    if rotary is None:
        return None
    positions = rotary_fields(rotary)
    return general_fields(model) | {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "max_position_embeddings": model.n_positions,
        "intermediate_size": layer.feed_forward.size,
        "hidden_act": HF_ACTIVATIONS[layer.feed_forward.activation],
        "layer_norm_eps": layer.norm.eps,
        "attention_bias": layer.attention.qkv_bias,
        "use_parallel_residual": layer.residual == "parallel_two_norms",
        "rotary_emb_base": positions.pop("rope_theta"),
        "rotary_pct": rotary.size / model.head_size,
        **positions,
    }


_LAYER_GPT_NEOX = "{prefix}layers.{i}."

GPT_NEOX = Family(
    model_type="gpt_neox",
    title="GPT-NeoX",
    architectures=("GPTNeoXForCausalLM", "GPTNeoXModel"),
    config_names={
        "n_positions": "max_position_embeddings",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "ffn_size": "intermediate_size",
        "norm_eps": "layer_norm_eps",
    },
    read=_read_gpt_neox,
    write=_write_gpt_neox,
    prefixes=("gpt_neox.", ""),
    weights={
        "token_embedding": as_it_is("{prefix}embed_in.weight"),
        "layers.{i}.qkv.weight": fused_heads(
            f"{_LAYER_GPT_NEOX}attention.query_key_value.weight", "by_group"
        ),
        "layers.{i}.qkv.bias": fused_heads(f"{_LAYER_GPT_NEOX}attention.query_key_value.bias", "by_group"),
        "layers.{i}.out.weight": query_heads(f"{_LAYER_GPT_NEOX}attention.dense.weight"),
        "layers.{i}.out.bias": as_it_is(f"{_LAYER_GPT_NEOX}attention.dense.bias"),
        "layers.{i}.up.weight": as_it_is(f"{_LAYER_GPT_NEOX}mlp.dense_h_to_4h.weight"),
        "layers.{i}.up.bias": as_it_is(f"{_LAYER_GPT_NEOX}mlp.dense_h_to_4h.bias"),
        "layers.{i}.down.weight": as_it_is(f"{_LAYER_GPT_NEOX}mlp.dense_4h_to_h.weight"),
        "layers.{i}.down.bias": as_it_is(f"{_LAYER_GPT_NEOX}mlp.dense_4h_to_h.bias"),
        "layers.{i}.attn_norm.scale": as_it_is(f"{_LAYER_GPT_NEOX}input_layernorm.weight"),
        "layers.{i}.attn_norm.bias": as_it_is(f"{_LAYER_GPT_NEOX}input_layernorm.bias"),
        "layers.{i}.mlp_norm.scale": as_it_is(f"{_LAYER_GPT_NEOX}post_attention_layernorm.weight"),
        "layers.{i}.mlp_norm.bias": as_it_is(f"{_LAYER_GPT_NEOX}post_attention_layernorm.bias"),
        "final_norm.scale": as_it_is("{prefix}final_layer_norm.weight"),
        "final_norm.bias": as_it_is("{prefix}final_layer_norm.bias"),
        "head.weight": as_it_is("embed_out.weight"),
    },
    aliases={"embed_out.weight": "lm_head.weight"},  # transformers 5 renamed the head
    buffers=r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)|rotary_emb\.inv_freq",
)


def _read_gptj(fields: ConfigFields) -> ModelConfig:
    fields.must_be("rotary", True, "a GPT-J without rotary positions")
    fields.must_be("scale_attn_weights", True, "attention without the scale of 1 / sqrt(head size)")
    hidden_size, n_heads = (
        fields.whole("n_embd", "hidden_size"),
        fields.whole("n_head", "num_attention_heads"),
    )
    sizes = Sizes(
        vocab_size=fields.whole("vocab_size"),
        n_positions=fields.whole("n_positions", "max_position_embeddings"),
        hidden_size=hidden_size,
        n_layers=fields.whole("n_layer", "num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_size=even_head_size(hidden_size, n_heads),
    )
    norm = Norm(eps=fields.number("layer_norm_epsilon", 1e-5))
    layer = Layer(
        attention=Attention(
            n_heads=n_heads,
            n_kv_heads=n_heads,
            head_size=sizes.head_size,
            qkv_bias=False,
            out_bias=False,
            rotary=Rotary(size=fields.whole("rotary_dim"), interleaved=True),
        ),
        feed_forward=FeedForward(
            size=fields.whole("n_inner", default=4 * hidden_size),
            activation=fields.activation("activation_function", "gelu_new"),
        ),
        norm=norm,
        residual="parallel",
    )
    return decoder(fields, sizes, alike(layer, sizes.n_layers), final_norm=norm, head_bias=True)


def _write_gptj(model: ModelConfig) -> dict[str, Any] | None:
    layer = model.layers[0]
    if layer.attention.rotary is None:
        return None
    return general_fields(model) | {
        "n_positions": model.n_positions,
        "n_embd": model.hidden_size,
        "n_layer": model.n_layers,
        "n_head": model.n_heads,
        "n_inner": layer.feed_forward.size,
        "rotary_dim": layer.attention.rotary.size,
        "activation_function": HF_ACTIVATIONS[layer.feed_forward.activation],
        "layer_norm_epsilon": layer.norm.eps,
    }


_LAYER_GPTJ = "{prefix}h.{i}."

GPTJ = Family(
    model_type="gptj",
    title="GPT-J",
    architectures=("GPTJForCausalLM", "GPTJModel"),
    config_names={
        "hidden_size": "n_embd",
        "n_layers": "n_layer",
        "n_heads": "n_head",
        "ffn_size": "n_inner",
        "norm_eps": "layer_norm_epsilon",
        "rotary_size": "rotary_dim",
    },
    read=_read_gptj,
    write=_write_gptj,
    prefixes=("transformer.", ""),
    weights={
        "token_embedding": as_it_is("{prefix}wte.weight"),
        "layers.{i}.qkv.weight": separate_heads(*(f"{_LAYER_GPTJ}attn.{part}_proj.weight" for part in "qkv")),
        "layers.{i}.out.weight": query_heads(f"{_LAYER_GPTJ}attn.out_proj.weight"),
        "layers.{i}.up.weight": as_it_is(f"{_LAYER_GPTJ}mlp.fc_in.weight"),
        "layers.{i}.up.bias": as_it_is(f"{_LAYER_GPTJ}mlp.fc_in.bias"),
        "layers.{i}.down.weight": as_it_is(f"{_LAYER_GPTJ}mlp.fc_out.weight"),
        "layers.{i}.down.bias": as_it_is(f"{_LAYER_GPTJ}mlp.fc_out.bias"),
        "layers.{i}.attn_norm.scale": as_it_is(f"{_LAYER_GPTJ}ln_1.weight"),
        "layers.{i}.attn_norm.bias": as_it_is(f"{_LAYER_GPTJ}ln_1.bias"),
        "final_norm.scale": as_it_is("{prefix}ln_f.weight"),
        "final_norm.bias": as_it_is("{prefix}ln_f.bias"),
        "head.weight": as_it_is("lm_head.weight"),
        "head.bias": as_it_is("lm_head.bias"),
    },
    buffers=r"h\.\d+\.attn\.(bias|masked_bias|embed_positions)",
)
