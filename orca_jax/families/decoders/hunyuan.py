"""HunYuan (Tencent, 2025), the dense models: Llama with norms of each head's queries and keys after rotation.

Its scaling `dynamic` with an `alpha` is another base, whatever the length of a sequence.
"""

from typing import Any

from orca_jax.families.attention_config import QKNorm
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.decoders.llama_like import (
    Sizes,
    common_fields,
    decoder,
    read_layer,
    read_sizes,
    relative,
)
from orca_jax.families.decoders.rope_fields import read_rotary, rope_section
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.rotary import Rotary
from orca_jax.families.stored_name import as_it_is

_LAYER = "{prefix}layers.{i}."
_BASE = 10_000.0


def _read(fields: ConfigFields) -> ModelConfig:
    sizes = read_sizes(fields)
    for name in ("qk_norm", "use_qk_norm"):
        fields.must_be(name, True, "attention without norms of queries and keys")
    fields.must_be("use_rotary_pos_emb", True, "attention without rotary positions")
    layer = read_layer(
        fields, sizes, bias=fields.flag("attention_bias", False), eps=1e-5, rotary=_rotary(fields, sizes)
    )
    norm = QKNorm(norm=layer.norm, after_rotation=True)
    return decoder(fields, sizes, layer.with_attention(qk_norm=norm))


def _rotary(fields: ConfigFields, sizes: Sizes) -> Rotary:
    found = rope_section(fields)
    alpha = 0.0 if found is None else found.number("alpha", 0.0)
    if found is None or not alpha or "dynamic" not in (found.raw("rope_type"), found.raw("type")):
        return read_rotary(fields, head_size=sizes.head_size, n_positions=sizes.n_positions)
    base = found.number("rope_theta", fields.number("rope_theta", _BASE))
    size = sizes.head_size
    return Rotary(size=size, base=base * alpha ** (size / max(size - 2, 1)))


def _write(model: ModelConfig) -> dict[str, Any] | None:
    return common_fields(model) | {"attention_bias": model.attention.qkv_bias}


HUNYUAN_V1_DENSE = relative(
    model_type="hunyuan_v1_dense",
    title="HunYuan",
    architectures=("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Model"),
    read=_read,
    write=_write,
    weights={
        "layers.{i}.q_norm.scale": as_it_is(f"{_LAYER}self_attn.query_layernorm.weight"),
        "layers.{i}.k_norm.scale": as_it_is(f"{_LAYER}self_attn.key_layernorm.weight"),
    },
    unread={"eod_token_id": "the end of a document, in training"},
)
