"""EleutherAI's decoders: GPT-J (Wang & Komatsuzaki, 2021), and GPT-NeoX with Pythia (Black et al., 2022;
Biderman et al., 2023). Both rotate a part of each head; GPT-J has one norm a layer, and a head with bias.
"""

from typing import Any

from orca_jax.errors import BadModelConfig
from orca_jax.families.config_fields import HF_ACTIVATIONS, ConfigFields
from orca_jax.families.decoders.bloom import megatron_layer
from orca_jax.families.decoders.llama_like import CONFIG_NAMES, decoder, read_older_sizes, size_fields
from orca_jax.families.decoders.rope_fields import read_rotary, rotary_fields
from orca_jax.families.family import Family
from orca_jax.families.model_config import FeedForward, Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.rotary import Rotary
from orca_jax.families.stored_name import as_it_is, layer_norm, linear, query_heads, separate_heads
from orca_jax.families.strict_json import shown

_GPT_NEOX_NAMES = {
    **{name: CONFIG_NAMES[name] for name in ("n_positions", "n_layers", "n_heads", "ffn_size")},
    "norm_eps": "layer_norm_eps",
}
_GPTJ_NAMES = {
    "n_positions": "n_positions",
    "hidden_size": "n_embd",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "ffn_size": "n_inner",
    "norm_eps": "layer_norm_epsilon",
    "rotary_size": "rotary_dim",
}
_GPTJ_LAYER = "{prefix}h.{i}."


def _read_rotary(fields: ConfigFields, head_size: int, n_positions: int) -> Rotary:
    """Read rotary positions, whose base and share of a head had other names before transformers 5."""
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
    sizes = read_older_sizes(fields, _GPT_NEOX_NAMES)
    bias = fields.flag("attention_bias", True)
    rotary = _read_rotary(fields, sizes.head_size, sizes.n_positions)
    layer = Layer(
        attention=sizes.attention(qkv_bias=bias, out_bias=bias, rotary=rotary),
        feed_forward=FeedForward(
            size=fields.whole("intermediate_size"), activation=fields.activation("hidden_act", "gelu")
        ),
        norm=Norm(eps=fields.number("layer_norm_eps", 1e-5)),
        residual="parallel_two_norms" if fields.flag("use_parallel_residual", True) else "pre",
    )
    return decoder(fields, sizes, layer)


def _write_gpt_neox(model: ModelConfig) -> dict[str, Any] | None:
    layer = model.layers[0]
    rotary = model.attention.rotary
    if rotary is None:
        return None
    positions = rotary_fields(rotary)
    return size_fields(model, _GPT_NEOX_NAMES) | {
        "hidden_act": HF_ACTIVATIONS[model.feed_forward.activation],
        "attention_bias": model.attention.qkv_bias,
        "use_parallel_residual": layer.residual == "parallel_two_norms",
        "rotary_emb_base": positions.pop("rope_theta"),
        "rotary_pct": rotary.size / model.head_size,
        **positions,
    }


GPT_NEOX = Family(
    model_type="gpt_neox",
    title="GPT-NeoX",
    architectures=("GPTNeoXForCausalLM", "GPTNeoXModel"),
    config_names=_GPT_NEOX_NAMES,
    read=_read_gpt_neox,
    write=_write_gpt_neox,
    prefixes=("gpt_neox.", ""),
    weights={
        "token_embedding": as_it_is("{prefix}embed_in.weight"),
        **megatron_layer("{prefix}layers.{i}.", "attention"),
        **layer_norm("final_norm", "{prefix}final_layer_norm"),
        "head.weight": as_it_is("embed_out.weight"),
    },
    aliases={"embed_out.weight": "lm_head.weight"},  # transformers 5 renamed the head
    buffers=r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)|rotary_emb\.inv_freq",
)


def _read_gptj(fields: ConfigFields) -> ModelConfig:
    fields.must_be("rotary", True, "a GPT-J without rotary positions")
    fields.must_be("scale_attn_weights", True, "attention without the scale of 1 / sqrt(head size)")
    sizes = read_older_sizes(fields, _GPTJ_NAMES)
    rotary = Rotary(size=fields.whole("rotary_dim"), interleaved=True)
    layer = Layer(
        attention=sizes.attention(qkv_bias=False, out_bias=False, rotary=rotary),
        feed_forward=FeedForward(
            size=fields.whole("n_inner", default=4 * sizes.hidden_size),
            activation=fields.activation("activation_function", "gelu_new"),
        ),
        norm=Norm(eps=fields.number("layer_norm_epsilon", 1e-5)),
        residual="parallel",
    )
    return decoder(fields, sizes, layer, head_bias=True)


def _write_gptj(model: ModelConfig) -> dict[str, Any] | None:
    _layer, rotary = model.layers[0], model.attention.rotary
    if rotary is None:
        return None
    return size_fields(model, _GPTJ_NAMES) | {
        "rotary_dim": rotary.size,
        "activation_function": HF_ACTIVATIONS[model.feed_forward.activation],
    }


GPTJ = Family(
    model_type="gptj",
    title="GPT-J",
    architectures=("GPTJForCausalLM", "GPTJModel"),
    config_names=_GPTJ_NAMES,
    read=_read_gptj,
    write=_write_gptj,
    prefixes=("transformer.", ""),
    weights={
        "token_embedding": as_it_is("{prefix}wte.weight"),
        "layers.{i}.qkv.weight": separate_heads(*(f"{_GPTJ_LAYER}attn.{part}_proj.weight" for part in "qkv")),
        "layers.{i}.out.weight": query_heads(f"{_GPTJ_LAYER}attn.out_proj.weight"),
        **linear("layers.{i}.up", f"{_GPTJ_LAYER}mlp.fc_in"),
        **linear("layers.{i}.down", f"{_GPTJ_LAYER}mlp.fc_out"),
        **layer_norm("layers.{i}.attn_norm", f"{_GPTJ_LAYER}ln_1"),
        **layer_norm("final_norm", "{prefix}ln_f"),
        **linear("head", "lm_head"),
    },
    buffers=r"h\.\d+\.attn\.(bias|masked_bias|embed_positions)",
)
