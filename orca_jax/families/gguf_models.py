"""The model of a GGUF file: config.json's fields from its metadata, and our weights by its tensors' names.

`general.architecture` is one of ARCHITECTURES: the family that computes it, how its metadata becomes the
family's config.json (so that the family itself reads and checks it), and what its tensors are called. Most
names are the same in all (WEIGHTS).

Three things are stored otherwise than in a Hugging Face checkpoint. Llama's files have each head's rows of
queries and keys in pairs that rotate together (`paired`), where a checkpoint has a head's halves. Gemma's
have 1 + w as the weights of norms (`shifted`), where a checkpoint has w. And the factors of Llama 3's and
Phi-3's rotary frequencies are tensors, not numbers in the configuration.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from orca_jax.errors import BadModelConfig, CorruptFile, UnsupportedModel, closest
from orca_jax.families.family import Family
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.packed_form import GGUF_FORMS, joined
from orca_jax.families.parameters import packable_weights
from orca_jax.families.stored_name import (
    StoredName,
    all_experts,
    as_it_is,
    fused_heads,
    key_heads,
    linear,
    query_heads,
    separate_heads,
    stacked,
)
from orca_jax.families.strict_json import shown
from orca_jax.families.weight_form import DENSE, WeightForm
from orca_jax.gguf_file import GgufFile

_LAYER = "blk.{i}."
_MODEL, _TOKENIZER = "general.architecture", "tokenizer.ggml."
# Tensors that are part of the configuration, that follow from it, or that no model reads.
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_UNUSED = (r"blk\.\d+\.attn_rot_embd", r"dec\.blk\.\d+\.cross_attn_rel_b\.weight")
_BUFFERS = "|".join((*map(re.escape, _FACTORS), *_UNUSED))


def _both(ours: str, theirs: str, make: Callable[[str], StoredName] = as_it_is) -> dict[str, StoredName]:
    """The weight and the bias of a linear layer."""
    return linear(ours, f"{_LAYER}{theirs}", make)


def _norm(ours: str, theirs: str) -> dict[str, StoredName]:
    return {f"{ours}.scale": as_it_is(f"{theirs}.weight"), f"{ours}.bias": as_it_is(f"{theirs}.bias")}


def _experts(leaf: str) -> dict[str, StoredName]:
    """A tensor for each matrix, or bias, of all experts of a layer."""
    gate, up, down = (f"{_LAYER}ffn_{part}_exps.{leaf}" for part in ("gate", "up", "down"))
    return {
        f"layers.{{i}}.experts.up.{leaf}": replace(all_experts(gate), names=(gate, up)),
        f"layers.{{i}}.experts.down.{leaf}": all_experts(down),
    }


WEIGHTS: Mapping[str, StoredName] = {
    "token_embedding": as_it_is("token_embd.weight"),
    **{
        f"layers.{{i}}.qkv.{leaf}": separate_heads(*(f"{_LAYER}attn_{part}.{leaf}" for part in "qkv"))
        for leaf in ("weight", "bias")
    },
    "layers.{i}.q_norm.scale": as_it_is(f"{_LAYER}attn_q_norm.weight"),
    "layers.{i}.k_norm.scale": as_it_is(f"{_LAYER}attn_k_norm.weight"),
    "layers.{i}.sinks": query_heads(f"{_LAYER}attn_sinks.weight"),
    **_both("layers.{i}.out", "attn_output", query_heads),
    **{
        f"layers.{{i}}.up.{leaf}": stacked(*(f"{_LAYER}ffn_{part}.{leaf}" for part in ("gate", "up")))
        for leaf in ("weight", "bias")
    },
    **_both("layers.{i}.down", "ffn_down"),
    **_norm("layers.{i}.attn_norm", f"{_LAYER}attn_norm"),
    **_norm("layers.{i}.mlp_norm", f"{_LAYER}ffn_norm"),
    **_norm("layers.{i}.attn_out_norm", f"{_LAYER}post_attention_norm"),
    **_norm("layers.{i}.mlp_out_norm", f"{_LAYER}post_ffw_norm"),
    **_both("layers.{i}.router", "ffn_gate_inp"),
    **_experts("weight"),
    **_experts("bias"),
    "layers.{i}.shared.up.weight": stacked(*(f"{_LAYER}ffn_{part}_shexp.weight" for part in ("gate", "up"))),
    "layers.{i}.shared.down.weight": as_it_is(f"{_LAYER}ffn_down_shexp.weight"),
    "layers.{i}.shared.gate": as_it_is(f"{_LAYER}ffn_gate_inp_shexp.weight"),
    **_norm("final_norm", "output_norm"),
    "head.weight": as_it_is("output.weight"),
}
_WIDE_NORMS: Mapping[str, StoredName] = {
    "layers.{i}.q_norm.scale": query_heads(f"{_LAYER}attn_q_norm.weight"),
    "layers.{i}.k_norm.scale": key_heads(f"{_LAYER}attn_k_norm.weight"),
}
_UNGATED: Mapping[str, StoredName] = _both("layers.{i}.up", "ffn_up")
_OLDER: Mapping[str, StoredName] = {  # the decoders before Llama
    **linear("layers.{i}.qkv", f"{_LAYER}attn_qkv", fused_heads, fused_heads),
    **_UNGATED,
    "position_embedding": as_it_is("position_embd.weight"),
    **_norm("embedding_norm", "token_embd_norm"),
}


_LATENT: Mapping[str, StoredName] = {
    "layers.{i}.q.weight": as_it_is(f"{_LAYER}attn_q.weight"),
    "layers.{i}.q_a.weight": as_it_is(f"{_LAYER}attn_q_a.weight"),
    "layers.{i}.q_a_norm.scale": as_it_is(f"{_LAYER}attn_q_a_norm.weight"),
    "layers.{i}.q_b.weight": as_it_is(f"{_LAYER}attn_q_b.weight"),
    "layers.{i}.kv_a.weight": as_it_is(f"{_LAYER}attn_kv_a_mqa.weight"),
    "layers.{i}.kv_a_norm.scale": as_it_is(f"{_LAYER}attn_kv_a_norm.weight"),
    "layers.{i}.kv_b.weight": as_it_is(f"{_LAYER}attn_kv_b.weight"),
    "layers.{i}.out.weight": as_it_is(f"{_LAYER}attn_output.weight"),
    "layers.{i}.router.correction": as_it_is(f"{_LAYER}exp_probs_b.bias"),
}


def _t5_side(side: str, ours: str, bias_layer: str) -> dict[str, StoredName]:
    """The weights of T5's encoder or decoder; each layer's relative bias is the table of `bias_layer`."""
    block = f"{side}.blk.{{i}}."
    return {
        f"{ours}layers.{{i}}.qkv.weight": stacked(*(f"{block}attn_{part}.weight" for part in "qkv")),
        f"{ours}layers.{{i}}.out.weight": as_it_is(f"{block}attn_o.weight"),
        f"{ours}layers.{{i}}.relative_bias": as_it_is(f"{side}.blk.{bias_layer}.attn_rel_b.weight"),
        f"{ours}layers.{{i}}.attn_norm.scale": as_it_is(f"{block}attn_norm.weight"),
        f"{ours}layers.{{i}}.up.weight": as_it_is(f"{block}ffn_up.weight"),
        f"{ours}layers.{{i}}.down.weight": as_it_is(f"{block}ffn_down.weight"),
        f"{ours}layers.{{i}}.mlp_norm.scale": as_it_is(f"{block}ffn_norm.weight"),
        f"{ours}final_norm.scale": as_it_is(f"{side}.output_norm.weight"),
    }


def _t5_weights(bias_layer: str) -> dict[str, StoredName]:
    cross = "dec.blk.{i}.cross_attn_"
    return {
        **_t5_side("enc", "encoder.", bias_layer),
        **_t5_side("dec", "", bias_layer),
        "layers.{i}.cross_q.weight": as_it_is(f"{cross}q.weight"),
        "layers.{i}.cross_kv.weight": stacked(*(f"{cross}{part}.weight" for part in "kv")),
        "layers.{i}.cross_out.weight": as_it_is(f"{cross}o.weight"),
        "layers.{i}.cross_norm.scale": as_it_is(f"{cross}norm.weight"),
    }


# Gated feed-forward parts have two tensors.
_T5_GATED: Mapping[str, StoredName] = {
    f"{ours}layers.{{i}}.up.weight": stacked(
        *(f"{side}.blk.{{i}}.ffn_{part}.weight" for part in ("gate", "up"))
    )
    for side, ours in (("enc", "encoder."), ("dec", ""))
}
# Newer files have keys and values apart, the keys of each head transposed.
KEYS_AND_VALUES = (f"{_LAYER}attn_k_b.weight", f"{_LAYER}attn_v_b.weight")


class Metadata:
    """The metadata of one file, whose keys of sizes begin with the architecture's name."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = file.text(_MODEL)

    def has(self, key: str) -> bool:
        return self._key(key) in self.file

    def whole(self, key: str, default: int | None = None) -> int:
        return self.file.whole(self._key(key), default)

    def number(self, key: str, default: float | None = None) -> float:
        return self.file.number(self._key(key), default)

    def flag(self, key: str, default: bool) -> bool:
        return self.file.flag(self._key(key), default)

    def text(self, key: str, default: str) -> str:
        return self.file.text(self._key(key), default)

    def same_in_layers(self, key: str, default: int | None = None) -> int:
        """A whole number that may be given for each layer. Raises UnsupportedModel where layers differ."""
        key = self._key(key)
        try:
            return self.file.whole(key, default)
        except BadModelConfig:
            values = sorted({int(value) for value in self.file.numbers(key)})
            if not values:
                raise
            if len(values) > 1:
                raise UnsupportedModel(
                    f"{self.file.path}: {key}: expected the same number in all layers, found {shown(values)}"
                ) from None
            return values[0]

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def floats(self, name: str, most: int) -> list[float]:
        """The numbers of a short vector in float32. Raises BadModelConfig."""
        tensor = self.file.tensors[name]
        if tensor.type != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > most:
            raise BadModelConfig(
                f"{self.file.path}: tensor '{name}': expected F32 and at most {most} numbers, found "
                f"{tensor.type} {list(tensor.shape)}"
            )
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            data = file.read(tensor.n_bytes)
        if len(data) < tensor.n_bytes:
            raise CorruptFile(
                f"{self.file.path}: tensor '{name}' cannot be read: the file has become shorter"
            )
        return [float(str(value)) for value in np.frombuffer(data, "<f4")]

    def _key(self, key: str) -> str:
        return f"{self.architecture}.{key}"


def _no_more(_: Metadata) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One value of general.architecture: the `model_type` of its family, and what differs from the others.

    `fields` makes the family's own fields of config.json, null for those of `_common` that it lacks.
    `weights` has the names that differ from WEIGHTS, `alternatives` those of some files
    (Family.alternatives).
    """

    model_type: str
    fields: Callable[[Metadata], dict[str, Any]] = _no_more
    weights: Mapping[str, StoredName] = field(default_factory=dict[str, StoredName])
    alternatives: Mapping[str, StoredName] = field(default_factory=dict[str, StoredName])
    paired: bool = False
    shifted: bool = False

    def named(self, family: Family) -> Family:
        """The family with a GGUF file's names of weights."""
        return replace(
            family,
            prefixes=("",),
            weights={**WEIGHTS, **self.weights},
            renamed=None,
            aliases={},
            alternatives=self.alternatives,
            buffers=_BUFFERS,
            copies="",
            further=None,
            parts="",
        )


def read_architecture(file: GgufFile) -> tuple[Architecture, dict[str, Any]]:
    """The architecture of a file, and the fields of config.json that its metadata and tensors stand for.

    Raises UnsupportedModel for an architecture that is not read, BadModelConfig or CorruptFile.
    """
    metadata = Metadata(file)
    name = metadata.architecture
    if name not in ARCHITECTURES:
        near = closest(name, ARCHITECTURES)
        hint = f" (the closest is {near})" if near else ""
        raise UnsupportedModel(
            f"{file.path}: {_MODEL}: expected one of {', '.join(ARCHITECTURES)}, found '{shown(name)}'{hint}"
        )
    if metadata.file.text("general.type", "model") != "model":
        raise UnsupportedModel(
            f"{file.path} holds no whole model: general.type is {shown(metadata.file.text('general.type'))}"
        )
    kind = ARCHITECTURES[name]
    if name == "llama" and metadata.whole("expert_count", 0):
        kind = _MIXTRAL
    if name == "deepseek2" and metadata.whole("expert_gating_func", 0) == _SIGMOID:
        kind = _DEEPSEEK_V3
    if name == "t5" and any(map(metadata.has_tensor, _SECOND_TABLES)):
        kind = _UMT5
    return kind, {"model_type": kind.model_type, **_common(metadata), **kind.fields(metadata)}


def config_names(file: GgufFile) -> Mapping[str, str]:
    """Our names of sizes, which errors use, and the file's keys."""
    names = {
        **{"n_positions": "context_length", "n_layers": "block_count", "hidden_size": "embedding_length"},
        **{"n_heads": "attention.head_count", "n_kv_heads": "attention.head_count_kv"},
        **{"head_size": "attention.key_length", "ffn_size": "feed_forward_length"},
        **{"norm_eps": "attention.layer_norm_rms_epsilon", "window": "attention.sliding_window"},
        **{"n_experts": "expert_count", "top_k": "expert_used_count"},
    }
    architecture = file.text(_MODEL)
    return {ours: f"{architecture}.{key}" for ours, key in names.items()}


def check_tokens(file: GgufFile, vocab_size: int) -> None:
    """Raise BadModelConfig where the vocabulary has more tokens than the embedding has rows."""
    tokens = file.length(f"{_TOKENIZER}tokens")
    if tokens > vocab_size:
        raise BadModelConfig(
            f"{file.path} disagrees with itself: token_embd.weight has {vocab_size} rows, {_TOKENIZER}tokens "
            f"has {tokens} tokens"
        )


def weight_forms(file: GgufFile, family: Family, model: ModelConfig) -> dict[str, WeightForm]:
    """The form of each weight that the file has packed; `family` has the file's names.

    Experts of which gate and up have two types become dense, as does a matrix whose size does not fit the
    metadata, which the reader of tensors then refuses.
    """
    found: dict[str, WeightForm] = {}
    for name, parameter in packable_weights(model).items():
        names = family.stored_name(name, "", model, file.tensors).names
        tensors = [file.tensors[each] for each in names if each in file.tensors]
        forms: list[WeightForm] = [GGUF_FORMS.get(tensor.type, DENSE) for tensor in tensors]
        if len(tensors) < len(names) or (parameter.use == "expert" and len(set(forms)) > 1):
            continue
        form = forms[0] if parameter.use == "expert" else joined(forms)
        if math.prod(parameter.shape[len(parameter.shape) - parameter.n_in :]) % form.multiple == 0:
            found[name] = form
    return found


def _common(metadata: Metadata) -> dict[str, Any]:
    """The fields that all architectures have."""
    file, embedding = metadata.file, metadata.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise BadModelConfig(f"{file.path} has no matrix 'token_embd.weight', which every model has")
    n_heads, hidden_size = metadata.same_in_layers("attention.head_count"), metadata.whole("embedding_length")
    head_size = metadata.whole("attention.key_length", hidden_size // max(1, n_heads))
    is_latent = metadata.has("attention.kv_lora_rank")
    if metadata.whole("attention.value_length", head_size) != head_size and not is_latent:
        raise UnsupportedModel(
            f"{file.path}: attention.value_length: expected attention.key_length, {head_size}, found "
            f"{metadata.whole('attention.value_length')}"
        )
    eps = "attention.layer_norm_rms_epsilon"
    ends = [file.whole(f"{_TOKENIZER}{name}_token_id", -1) for name in ("eos", "eot", "eom")]
    starts = file.whole(f"{_TOKENIZER}bos_token_id", -1)
    return {
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": metadata.whole("context_length"),
        "hidden_size": hidden_size,
        "num_hidden_layers": metadata.whole("block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": metadata.same_in_layers("attention.head_count_kv", n_heads),
        "head_dim": head_size,
        "intermediate_size": metadata.same_in_layers("feed_forward_length", 0) or None,
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        "bos_token_id": starts if starts in range(embedding.shape[0]) else None,
        "eos_token_id": list(dict.fromkeys(i for i in ends if i in range(embedding.shape[0]))),
        **({"rms_norm_eps": metadata.number(eps)} if metadata.has(eps) else {}),
        "rope_theta": metadata.number("rope.freq_base", 10_000.0),
        **_scaling(metadata, head_size),
        **_rotated_part(metadata, head_size),
    }


def _rotated_part(metadata: Metadata, head_size: int) -> dict[str, Any]:
    """The share of a head that is rotated, where it is not the whole; most families refuse the field."""
    size = metadata.whole("rope.dimension_count", head_size)
    return {} if size == head_size else {"partial_rotary_factor": size / head_size}


def _scaling(metadata: Metadata, head_size: int) -> dict[str, Any]:
    """The rotary scaling: factors of each frequency, in tensors, or a kind with its numbers."""
    original = metadata.whole("rope.scaling.original_context_length", metadata.whole("context_length"))
    kind, most = metadata.text("rope.scaling.type", "none"), head_size // 2
    single, long, short = _FACTORS
    found: dict[str, Any]
    if metadata.has_tensor(single):
        factors = metadata.floats(single, most)
        found = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
        found |= {"factor": 1.0, "attention_factor": 1.0}
    elif metadata.has_tensor(long):
        found = {
            "rope_type": "longrope",
            "attention_factor": metadata.number("rope.scaling.attn_factor", 1.0),
        }
        found |= {"long_factor": metadata.floats(long, most), "short_factor": metadata.floats(short, most)}
    elif kind in ("none", ""):
        return {}
    elif kind in ("linear", "yarn"):
        found = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor", 1.0)}
    else:
        raise UnsupportedModel(
            f"{metadata.file.path}: rope.scaling.type: expected none, linear or yarn, or the tensors "
            f"{single}, or {long} and {short}; found {shown(kind)}"
        )
    if found["rope_type"] != "linear":
        found["original_max_position_embeddings"] = original
    return {"rope_scaling": found}


def _llama(metadata: Metadata) -> dict[str, Any]:
    has = metadata.has_tensor
    return {"attention_bias": has("blk.0.attn_q.bias"), "mlp_bias": has("blk.0.ffn_up.bias")}


def _attention_bias(metadata: Metadata) -> dict[str, Any]:
    return {"attention_bias": metadata.has_tensor("blk.0.attn_q.bias")}


def _experts_of(metadata: Metadata, *, renormalised: bool) -> dict[str, Any]:
    return {
        "num_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "norm_topk_prob": renormalised,
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
    }


def _mixtral(metadata: Metadata) -> dict[str, Any]:
    number, top_k = metadata.whole("expert_count"), metadata.whole("expert_used_count")
    return {"num_local_experts": number, "num_experts_per_tok": top_k, "sliding_window": None}


def _qwen2_moe(metadata: Metadata) -> dict[str, Any]:
    shared = metadata.whole("expert_shared_feed_forward_length")
    return _experts_of(metadata, renormalised=False) | {"shared_expert_intermediate_size": shared}


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    return _experts_of(metadata, renormalised=True) | _attention_bias(metadata)


def _olmoe(metadata: Metadata) -> dict[str, Any]:
    fields = _experts_of(metadata, renormalised=False)
    return fields | {"intermediate_size": fields.pop("moe_intermediate_size")}


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    return _gemma3(metadata, largest=46) | {
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata, largest: int = 62) -> dict[str, Any]:
    """The window and the scale; the one model of each generation with `largest` layers has another scale."""
    scalar = metadata.whole("attention.key_length", 256)
    if metadata.whole("block_count") == largest:
        scalar = metadata.whole("embedding_length") // metadata.same_in_layers("attention.head_count")
    fields: dict[str, Any] = {
        "sliding_window": metadata.whole("attention.sliding_window", 4096),
        "query_pre_attn_scalar": scalar,
    }
    if metadata.has("attention.sliding_window_pattern"):
        fields["sliding_window_pattern"] = metadata.whole("attention.sliding_window_pattern")
    if metadata.has("rope.freq_base_swa"):
        fields["rope_local_base_freq"] = metadata.number("rope.freq_base_swa")
    if metadata.has("final_logit_softcapping"):
        fields["final_logit_softcapping"] = metadata.number("final_logit_softcapping")
    return fields


def _window(metadata: Metadata) -> dict[str, Any]:
    return {"sliding_window": metadata.whole("attention.sliding_window", 0) or None}


def _starcoder2(metadata: Metadata) -> dict[str, Any]:
    return {"norm_epsilon": metadata.number("attention.layer_norm_epsilon", 1e-5), **_window(metadata)}


def _granite(metadata: Metadata) -> dict[str, Any]:
    return _llama(metadata) | {
        "attention_multiplier": metadata.number("attention.scale", 1.0),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    fields = {
        "num_local_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "intermediate_size": metadata.whole("expert_feed_forward_length"),
        "sliding_window": metadata.whole("attention.sliding_window", 128),
    }
    scaling = _scaling(metadata, metadata.whole("attention.key_length", 64)).get("rope_scaling")
    return fields if scaling is None else fields | {"rope_scaling": scaling | {"truncate": False}}


# Fields of `_common` that the decoders before Llama lack.
_NO_LLAMA = dict.fromkeys(("head_dim", "num_key_value_heads", "intermediate_size"))
_NO_ROTARY = dict.fromkeys(("rope_theta", "rope_scaling", "partial_rotary_factor"))


def _layer_norm_eps(metadata: Metadata) -> float:
    return metadata.number("attention.layer_norm_epsilon", 1e-5)


def _gpt2(metadata: Metadata) -> dict[str, Any]:
    size = metadata.same_in_layers("feed_forward_length")
    return _NO_LLAMA | _NO_ROTARY | {"n_inner": size, "layer_norm_epsilon": _layer_norm_eps(metadata)}


def _bloom(metadata: Metadata) -> dict[str, Any]:
    fields = {"seq_length": metadata.whole("context_length"), "layer_norm_epsilon": _layer_norm_eps(metadata)}
    return _NO_LLAMA | _NO_ROTARY | fields


def _gpt_neox(metadata: Metadata) -> dict[str, Any]:
    head_size = metadata.whole("embedding_length") // max(1, metadata.same_in_layers("attention.head_count"))
    return {
        **dict.fromkeys(("head_dim", "num_key_value_heads", "partial_rotary_factor")),
        "rotary_pct": metadata.whole("rope.dimension_count", head_size) / max(1, head_size),
        "use_parallel_residual": metadata.flag("use_parallel_residual", True),
        "attention_bias": metadata.has_tensor("blk.0.attn_qkv.bias"),
        "layer_norm_eps": _layer_norm_eps(metadata),
    }


def _falcon(metadata: Metadata) -> dict[str, Any]:
    """Falcon 7B, or the new decoder, whose files have two norms or grouped heads."""
    n_heads = metadata.same_in_layers("attention.head_count")
    n_kv_heads = metadata.same_in_layers("attention.head_count_kv", n_heads)
    two_norms = metadata.has_tensor("blk.0.attn_norm_2.weight")
    return _NO_LLAMA | {
        "num_kv_heads": n_kv_heads,
        "multi_query": n_kv_heads == 1,
        "new_decoder_architecture": two_norms or n_kv_heads not in (1, n_heads),
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "ffn_hidden_size": metadata.same_in_layers("feed_forward_length"),
        "bias": metadata.has_tensor("blk.0.attn_qkv.bias"),
        "layer_norm_epsilon": _layer_norm_eps(metadata),
    }


def _deepseek(metadata: Metadata) -> dict[str, Any]:
    """Read what both versions have. Newer files have the sizes of one latent head as key_length."""
    key = metadata.whole("attention.key_length_mla", metadata.whole("attention.key_length"))
    value = metadata.whole("attention.value_length_mla", metadata.whole("attention.value_length"))
    rotary, number = metadata.whole("rope.dimension_count"), metadata.whole("expert_count")
    groups = (8, 4) if number == 256 else (1, 1)  # older files of DeepSeek-V3 do not state them
    found = {
        **dict.fromkeys(("head_dim", "num_key_value_heads", "partial_rotary_factor")),
        "kv_lora_rank": metadata.whole("attention.kv_lora_rank"),
        "q_lora_rank": metadata.whole("attention.q_lora_rank", 0) or None,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": value,
        "n_routed_experts": number,
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "n_shared_experts": metadata.whole("expert_shared_count", 0),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "first_k_dense_replace": metadata.whole("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "n_group": metadata.whole("expert_group_count", groups[0]),
        "topk_group": metadata.whole("expert_group_used_count", groups[1]),
    }
    scaling = _scaling(metadata, rotary).get("rope_scaling")
    if scaling is not None and metadata.has("rope.scaling.yarn_log_multiplier"):
        scale = metadata.number("rope.scaling.yarn_log_multiplier") / 0.1
        found["rope_scaling"] = scaling | {"mscale": scale, "mscale_all_dim": scale}
    return found


def _deepseek_v2(metadata: Metadata) -> dict[str, Any]:
    fields = _deepseek(metadata)
    return fields | {"topk_method": "group_limited_greedy" if fields["n_group"] > 1 else "greedy"}


def _t5(metadata: Metadata) -> dict[str, Any]:
    """The fields of T5's families; llama.cpp knows ReLU, and gates with GELU."""
    eps = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
    start = "decoder_start_token_id"
    return {
        **_NO_ROTARY,
        **dict.fromkeys(("max_position_embeddings", "num_key_value_heads", "rms_norm_eps")),
        "intermediate_size": None,
        "d_ff": metadata.same_in_layers("feed_forward_length"),
        "num_decoder_layers": metadata.whole("decoder_block_count", metadata.whole("block_count")),
        "layer_norm_epsilon": metadata.number(eps[0], metadata.number(eps[1], 1e-6)),
        "relative_attention_num_buckets": metadata.whole("attention.relative_buckets_count", 32),
        "feed_forward_proj": "gated-gelu" if metadata.has_tensor("enc.blk.0.ffn_gate.weight") else "relu",
        start: metadata.whole(start) if metadata.has(start) else None,
    }


_SIGMOID = 2  # of expert_gating_func
_SECOND_TABLES = ("enc.blk.1.attn_rel_b.weight", "dec.blk.1.attn_rel_b.weight")  # umT5's
_T5 = Architecture(model_type="t5", fields=_t5, weights=_t5_weights("0"), alternatives=_T5_GATED)
_UMT5 = replace(_T5, model_type="umt5", weights=_t5_weights("{i}"))
_ALTERNATIVES = {"layers.{i}.kv_b.weight": StoredName(KEYS_AND_VALUES)}
_DEEPSEEK_V3 = Architecture(
    model_type="deepseek_v3", fields=_deepseek, weights=_LATENT, alternatives=_ALTERNATIVES
)
_MIXTRAL = Architecture(model_type="mixtral", fields=_mixtral, paired=True)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(model_type="llama", fields=_llama, paired=True),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen2moe": Architecture(model_type="qwen2_moe", fields=_qwen2_moe),
    "qwen3": Architecture(model_type="qwen3", fields=_attention_bias),
    "qwen3moe": Architecture(model_type="qwen3_moe", fields=_qwen3_moe),
    "gemma": Architecture(model_type="gemma", shifted=True),
    "gemma2": Architecture(model_type="gemma2", fields=_gemma2, shifted=True),
    "gemma3": Architecture(model_type="gemma3_text", fields=_gemma3, shifted=True),
    "phi3": Architecture(
        model_type="phi3",
        fields=_window,
        weights={
            "layers.{i}.qkv.weight": fused_heads(f"{_LAYER}attn_qkv.weight"),
            "layers.{i}.up.weight": as_it_is(f"{_LAYER}ffn_up.weight"),
        },
    ),
    "olmo2": Architecture(model_type="olmo2", fields=_attention_bias, weights=_WIDE_NORMS),
    "olmoe": Architecture(model_type="olmoe", fields=_olmoe, weights=_WIDE_NORMS),
    "starcoder2": Architecture(model_type="starcoder2", fields=_starcoder2, weights=_UNGATED),
    "granite": Architecture(model_type="granite", fields=_granite, paired=True),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        fields=_gpt_oss,
        weights={"layers.{i}.mlp_norm.scale": as_it_is(f"{_LAYER}post_attention_norm.weight")},
    ),
    "deepseek2": replace(_DEEPSEEK_V3, model_type="deepseek_v2", fields=_deepseek_v2),
    "gpt2": Architecture(model_type="gpt2", fields=_gpt2, weights=_OLDER),
    "bloom": Architecture(model_type="bloom", fields=_bloom, weights=_OLDER),
    "gptneox": Architecture(model_type="gpt_neox", fields=_gpt_neox, weights=_OLDER),
    "falcon": Architecture(
        model_type="falcon",
        fields=_falcon,
        weights={**_OLDER, **_norm("layers.{i}.mlp_norm", f"{_LAYER}attn_norm")},
        alternatives=_norm("layers.{i}.attn_norm", f"{_LAYER}attn_norm_2"),
    ),
    "t5": _T5,
}
