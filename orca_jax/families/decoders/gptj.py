"""GPT-J (Wang & Komatsuzaki, 2021): interleaved rotary positions, one norm a layer, a head with bias."""

from typing import Any

from orca_jax.families.attention_config import Attention
from orca_jax.families.config_fields import HARMLESS, HF_ACTIVATIONS, ConfigFields, general_fields
from orca_jax.families.decoders.llama_like import Sizes, decoder
from orca_jax.families.family import Family
from orca_jax.families.limits import even_head_size
from orca_jax.families.model_config import FeedForward, Layer, ModelConfig, alike
from orca_jax.families.norm_config import Norm
from orca_jax.families.rotary import Rotary
from orca_jax.families.stored_name import as_it_is, query_heads, separate_heads


def _read(fields: ConfigFields) -> ModelConfig:
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


def _write(model: ModelConfig) -> dict[str, Any] | None:
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


_LAYER = "{prefix}h.{i}."

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
    read=_read,
    write=_write,
    prefixes=("transformer.", ""),
    weights={
        "token_embedding": as_it_is("{prefix}wte.weight"),
        "layers.{i}.qkv.weight": separate_heads(*(f"{_LAYER}attn.{part}_proj.weight" for part in "qkv")),
        "layers.{i}.out.weight": query_heads(f"{_LAYER}attn.out_proj.weight"),
        "layers.{i}.up.weight": as_it_is(f"{_LAYER}mlp.fc_in.weight"),
        "layers.{i}.up.bias": as_it_is(f"{_LAYER}mlp.fc_in.bias"),
        "layers.{i}.down.weight": as_it_is(f"{_LAYER}mlp.fc_out.weight"),
        "layers.{i}.down.bias": as_it_is(f"{_LAYER}mlp.fc_out.bias"),
        "layers.{i}.attn_norm.scale": as_it_is(f"{_LAYER}ln_1.weight"),
        "layers.{i}.attn_norm.bias": as_it_is(f"{_LAYER}ln_1.bias"),
        "final_norm.scale": as_it_is("{prefix}ln_f.weight"),
        "final_norm.bias": as_it_is("{prefix}ln_f.bias"),
        "head.weight": as_it_is("lm_head.weight"),
        "head.bias": as_it_is("lm_head.bias"),
    },
    buffers=r"h\.\d+\.attn\.(bias|masked_bias|embed_positions)",
    harmless=HARMLESS,
)
