"""Writes GGUF files for tests, and golden checkpoints with llama.cpp's names and order of rows."""

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Value types, and how each is packed.
_FORMS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
U32, I32, F32, BOOL, TEXT, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
TYPE_IDS = {
    **{"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10},
    **{"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "BF16": 30, "MXFP4": 39},
}


@dataclass(frozen=True)
class Value:
    """A metadata value with its type; `value` of the type ARRAY is a pair of a type and the elements."""

    type: int
    value: Any


def text_bytes(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value_bytes(value: Any) -> bytes:
    """A value of its own type, or of Python's: whole numbers become uint32, numbers float32."""
    if not isinstance(value, Value):
        value = _typed(value)
    return struct.pack("<I", value.type) + _untyped(value)


def _typed(value: Any) -> Value:
    if isinstance(value, bool):
        return Value(BOOL, value)
    if isinstance(value, int):
        return Value(U32, value)
    if isinstance(value, float):
        return Value(F32, value)
    if isinstance(value, str | bytes):
        return Value(TEXT, value)
    kind = _typed(value[0]).type if len(value) else U32
    return Value(ARRAY, (I32 if kind == U32 else kind, list(value)))


def _untyped(value: Value) -> bytes:
    if value.type == TEXT:
        return text_bytes(value.value)
    if value.type == ARRAY:
        kind, elements = value.value
        encoded = (_untyped(Value(kind, each)) for each in elements)
        return struct.pack("<IQ", kind, len(elements)) + b"".join(encoded)
    return struct.pack(_FORMS[value.type], value.value)


@dataclass(frozen=True)
class Tensor:
    """A tensor's type, shape with the outermost axis first, and bytes."""

    type: str
    shape: tuple[int, ...]
    data: bytes


def float_tensor(values: np.ndarray) -> Tensor:
    return Tensor("F32", values.shape, values.astype("<f4").tobytes())


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], version: int = 3) -> bytes:
    """A whole file."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += text_bytes(key) + value_bytes(value)
    data = b""
    for name, tensor in tensors.items():
        data += bytes(-len(data) % 32)
        sizes = tensor.shape[::-1]
        kind = TYPE_IDS[tensor.type]
        head += text_bytes(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, len(data))
        data += tensor.data
    return head + bytes(-len(head) % 32) + data


def small_model(**changes: Any) -> dict[str, Any]:
    """The metadata of a Llama of one layer without a tokenizer; a change to None leaves a key out."""
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 256,
        "llama.feed_forward_length": 256,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


SMALL_SHAPES: Mapping[str, tuple[int, ...]] = {
    "token_embd.weight": (96, 256),
    "blk.0.attn_norm.weight": (256,),
    "blk.0.attn_q.weight": (256, 256),
    "blk.0.attn_k.weight": (128, 256),
    "blk.0.attn_v.weight": (128, 256),
    "blk.0.attn_output.weight": (256, 256),
    "blk.0.ffn_norm.weight": (256,),
    "blk.0.ffn_gate.weight": (256, 256),
    "blk.0.ffn_up.weight": (256, 256),
    "blk.0.ffn_down.weight": (256, 256),
    "output_norm.weight": (256,),
}


def small_tensors(kind: str = "F32", seed: int = 0) -> dict[str, Tensor]:
    """The tensors of `small_model`: matrices of the type `kind` with random codes and small scales."""
    rng = np.random.default_rng(seed)
    return {
        name: random_tensor(rng, kind, shape) if len(shape) == 2 else float_tensor(np.ones(shape))
        for name, shape in SMALL_SHAPES.items()
    }


# Numbers in a block, its bytes, and where in it are float16 scales and minima.
_BLOCKS: Mapping[str, tuple[int, int, Sequence[int]]] = {
    **{"Q4_0": (32, 18, (0,)), "Q4_1": (32, 20, (0, 2)), "Q5_0": (32, 22, (0,)), "Q5_1": (32, 24, (0, 2))},
    **{"Q8_0": (32, 34, (0,)), "IQ4_NL": (32, 18, (0,)), "MXFP4": (32, 17, ())},
    **{"Q4_K": (256, 144, (0, 2)), "Q5_K": (256, 176, (0, 2)), "Q6_K": (256, 210, (208,))},
}
BLOCK_TYPES = tuple(_BLOCKS)


def random_tensor(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of random bytes whose numbers are small."""
    if kind == "F32":
        return float_tensor(0.05 * rng.normal(size=shape))
    if kind in ("F16", "BF16"):
        values = (0.05 * rng.normal(size=shape)).astype("<f4")
        data = (
            values.astype("<f2").tobytes()
            if kind == "F16"
            else (values.view("<u4") >> 16).astype("<u2").tobytes()
        )
        return Tensor(kind, shape, data)
    block, n_bytes, scales = _BLOCKS[kind]
    blocks = rng.integers(0, 256, (math.prod(shape) // block, n_bytes)).astype(np.uint8)
    for at in scales:
        numbers = rng.uniform(1e-4, 4e-3, len(blocks)) / (64 if kind.endswith("K") else 1)
        blocks[:, at : at + 2] = numbers.astype("<f2")[:, None].view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(117, 121, len(blocks))
    return Tensor(kind, shape, blocks.tobytes())


# A golden checkpoint's names in a layer, and llama.cpp's.
_NAMES = (
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    (r"self_attn\.o_proj", "attn_output"),
    (r"self_attn\.(q_[ab]|kv_b)_proj", r"attn_\1"),
    (r"self_attn\.(q|kv)_a_layernorm", r"attn_\1_a_norm"),
    (r"self_attn\.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    (r"mlp\.shared_experts\.(gate|up|down)_proj", r"ffn_\1_shexp"),
    (r"mlp\.gate\.e_score_correction_bias", "exp_probs_b.bias"),
    (r"self_attn\.qkv_proj", "attn_qkv"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
    (r"self_attn\.sinks", "attn_sinks.weight"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
    (r"mlp\.(gate_up_proj|c_fc)", "ffn_up"),
    (r"mlp\.c_proj", "ffn_down"),
    (r"mlp\.shared_expert\.(gate|up|down)_proj", r"ffn_\1_shexp"),
    (r"mlp\.shared_expert_gate", "ffn_gate_inp_shexp"),
    (r"(mlp|block_sparse_moe)\.(gate|router)\.", "ffn_gate_inp."),
    (r"input_layernorm", "attn_norm"),
    (r"pre_feedforward_layernorm", "ffn_norm"),
    (r"post_feedforward_layernorm", "post_ffw_norm"),
)
# The same for the decoders before Llama.
_OLDER_NAMES = (
    (r"(attn\.c_attn|(self_)?attention\.query_key_value)", "attn_qkv"),
    (r"(attn\.c_proj|(self_)?attention\.dense)", "attn_output"),
    (r"mlp\.(c_fc|dense_h_to_4h)", "ffn_up"),
    (r"mlp\.(c_proj|dense_4h_to_h)", "ffn_down"),
    (r"(ln_1|input_layernorm|ln_mlp)\.", "attn_norm."),
    (r"ln_attn", "attn_norm_2"),
    (r"(ln_2|post_attention_layernorm)", "ffn_norm"),
    (r"(wte|word_embeddings|embed_in)\.", "token_embd."),
    (r"word_embeddings_layernorm", "token_embd_norm"),
    (r"wpe", "position_embd"),
    (r"(ln_f|final_layer_norm)", "output_norm"),
    (r"(lm_head|embed_out)", "output"),
)
_OLDER = ("gpt2", "bloom", "gpt_neox", "falcon")
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_AFTER_ATTENTION = {
    "gemma2",
    "gemma3_text",
    "olmo2",
    "gpt_oss",
}  # whose norm is llama.cpp's post_attention_norm
_ARCHITECTURES = {
    **{"mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss"},
    **{"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_neox": "gptneox"},
    **{"deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2"},
}
_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "_sliding_window_pattern": "attention.sliding_window_pattern",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    **{"n_layer": "block_count", "n_positions": "context_length", "n_embd": "embedding_length"},
    **{"n_head": "attention.head_count", "n_inner": "feed_forward_length"},
    **{"num_kv_heads": "attention.head_count_kv", "ffn_hidden_size": "feed_forward_length"},
    **{
        "layer_norm_epsilon": "attention.layer_norm_epsilon",
        "layer_norm_eps": "attention.layer_norm_epsilon",
    },
    "use_parallel_residual": "use_parallel_residual",
    **{"kv_lora_rank": "attention.kv_lora_rank", "q_lora_rank": "attention.q_lora_rank"},
    **{"n_routed_experts": "expert_count", "n_shared_experts": "expert_shared_count"},
    **{"first_k_dense_replace": "leading_dense_block_count", "norm_topk_prob": "expert_weights_norm"},
    **{"n_group": "expert_group_count", "topk_group": "expert_group_used_count"},
    "routed_scaling_factor": "expert_weights_scale",
}


def as_gguf(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, keys_and_values: bool = False
) -> bytes:
    """The GGUF file in float32 that llama.cpp's converter would make of a checkpoint.

    With `keys_and_values` latent attention is as newer versions write it.
    """
    kind: str = config["model_type"]
    if kind in ("t5", "mt5", "umt5"):
        return _t5(config, tensors)
    name: str = _ARCHITECTURES.get(kind, kind)
    metadata: dict[str, Any] = {"general.architecture": name, "general.file_type": 0}
    for field, key in _KEYS.items():
        if config.get(field) is not None:
            metadata[f"{name}.{key}"] = config[field]
    if kind in ("olmoe", "gpt_oss"):
        metadata[f"{name}.expert_feed_forward_length"] = config["intermediate_size"]
    for token in ("bos", "eos"):
        metadata[f"tokenizer.ggml.{token}_token_id"] = config[f"{token}_token_id"]
    if kind in _OLDER:
        found = _older(config, tensors, metadata)
    else:
        found = {_renamed(each, kind): values.astype(np.float32) for each, values in tensors.items()}
        found = _changed(config, _with_experts(found, kind), name)
    if name == "deepseek2":
        _latent(config, found, metadata, keys_and_values=keys_and_values)
    if "rope_parameters" in config:
        metadata |= _rope(config, name, found)
    return gguf_bytes(metadata, {each: float_tensor(values) for each, values in found.items()})


# The names of T5's families in a layer's parts, and llama.cpp's.
_T5_NAMES = (
    (r"SelfAttention\.([qkvo])\.", r"attn_\1."),
    (r"SelfAttention\.relative_attention_bias", "attn_rel_b"),
    (r"EncDecAttention\.([qkvo])\.", r"cross_attn_\1."),
    (r"DenseReluDense\.wi_0", "ffn_gate"),
    (r"DenseReluDense\.(wi_1|wi)\.", "ffn_up."),
    (r"DenseReluDense\.wo", "ffn_down"),
)
_T5_KEYS = {
    **{"d_model": "embedding_length", "d_ff": "feed_forward_length", "num_layers": "block_count"},
    **{"num_heads": "attention.head_count", "d_kv": "attention.key_length"},
    **{"relative_attention_num_buckets": "attention.relative_buckets_count"},
    **{"layer_norm_epsilon": "attention.layer_norm_rms_epsilon"},
    **{"num_decoder_layers": "decoder_block_count", "decoder_start_token_id": "decoder_start_token_id"},
}


def _t5(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> bytes:
    metadata: dict[str, Any] = {"general.architecture": "t5", "t5.context_length": 512}
    metadata |= {f"t5.{key}": config[field] for field, key in _T5_KEYS.items() if config[field] is not None}
    metadata |= {"t5.attention.layer_norm_epsilon": config["layer_norm_epsilon"]}
    metadata |= {"t5.attention.value_length": config["d_kv"]}
    metadata["tokenizer.ggml.eos_token_id"] = config["eos_token_id"]
    found: dict[str, Tensor] = {}
    outside = {"shared.weight": "token_embd.weight", "lm_head.weight": "output.weight"}
    for name, values in tensors.items():
        layer = re.fullmatch(r"(enc|dec)oder\.block\.(\d+)\.layer\.(\d)\.(.*)", name)
        if layer:
            side, i, part, inner = layer.groups()
            norms = (
                ("attn_norm", "ffn_norm") if side == "enc" else ("attn_norm", "cross_attn_norm", "ffn_norm")
            )
            inner = inner.replace("layer_norm", norms[int(part)])
            for pattern, theirs in _T5_NAMES:
                inner = re.sub(f"^{pattern}", theirs, inner)
            name = f"{side}.blk.{i}.{inner}"
        else:
            name = re.sub(r"^(enc|dec)oder\.final_layer_norm", r"\1.output_norm", outside.get(name, name))
        found[name] = float_tensor(values)
    if "dec.blk.1.attn_rel_b.weight" not in found:  # T5's first files have a table that nothing reads
        found["dec.blk.0.cross_attn_rel_b.weight"] = found["dec.blk.0.attn_rel_b.weight"]
    return gguf_bytes(metadata, found)


def _renamed(name: str, kind: str) -> str:
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    if layer is None:
        module, _, leaf = name.rpartition(".")
        return f"{_OUTSIDE[module]}.{leaf}"
    inner = layer[2]
    for pattern, theirs in _NAMES:
        inner = re.sub(f"^{pattern}", theirs, inner)
    after = "post_attention_norm" if kind in _AFTER_ATTENTION else "ffn_norm"
    return f"blk.{layer[1]}.{inner.replace('post_attention_layernorm', after)}"


def _latent(
    config: Mapping[str, Any],
    tensors: dict[str, np.ndarray],
    metadata: dict[str, Any],
    *,
    keys_and_values: bool,
) -> None:
    """DeepSeek's sizes of heads and way of choosing experts; keys and values as two tensors."""
    rank, plain, value = (config[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"))
    rotary, n_heads = config["qk_rope_head_dim"], config["num_attention_heads"]
    sizes = {"key_length": plain + rotary, "value_length": value}
    if keys_and_values:
        sizes = {"key_length_mla": plain + rotary, "value_length_mla": value, "head_count_kv": 1}
        sizes |= {"key_length": rank + rotary, "value_length": rank}
        for name in [name for name in tensors if name.endswith("attn_kv_b.weight")]:
            by_head = tensors.pop(name).reshape(n_heads, plain + value, rank)
            tensors[name.replace("kv_b", "k_b")] = by_head[:, :plain].swapaxes(1, 2).copy()
            tensors[name.replace("kv_b", "v_b")] = by_head[:, plain:].copy()
    metadata |= {f"deepseek2.attention.{key}": size for key, size in sizes.items()}
    metadata["deepseek2.expert_gating_func"] = 2 if config["model_type"] == "deepseek_v3" else 1


def _older(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], metadata: dict[str, Any]
) -> dict[str, np.ndarray]:
    """The tensors of a decoder before Llama: queries, then keys, then values of all heads, all [out, in]."""
    kind: str = config["model_type"]
    n_heads: int = config.get("n_head") or config["num_attention_heads"]
    hidden: int = config.get("n_embd") or config["hidden_size"]
    n_kv_heads = n_heads
    if kind == "falcon":
        is_single = config["multi_query"] and not config["new_decoder_architecture"]
        n_kv_heads = metadata["falcon.attention.head_count_kv"] = 1 if is_single else config["num_kv_heads"]
    if kind in ("gpt2", "bloom") and config.get("n_inner") is None:
        metadata[f"{kind}.feed_forward_length"] = 4 * hidden
    found: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        inner = re.sub(r"^(transformer|gpt_neox)\.", "", name)
        if inner.endswith(".attn.bias"):  # the causal mask
            continue
        layer = re.fullmatch(r"(?:h|layers)\.(\d+)\.(.*)", inner)
        inner = layer[2] if layer else inner
        for pattern, theirs in _OLDER_NAMES:
            inner = re.sub(f"^{pattern}", theirs, inner)
        values = values.astype(np.float32)
        if kind == "gpt2":
            values = values.T if layer and values.ndim == 2 else values
        elif inner.startswith("attn_qkv"):
            by_group = values.reshape(n_kv_heads, n_heads // n_kv_heads + 2, hidden // n_heads, -1)
            parts = (by_group[:, :-2], by_group[:, -2:-1], by_group[:, -1:])
            values = np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])
        found[f"blk.{layer[1]}.{inner}" if layer else inner] = np.ascontiguousarray(values)
    return found


def _with_experts(tensors: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """One tensor for all experts of a layer."""
    found, experts = dict[str, np.ndarray](), dict[str, dict[int, np.ndarray]]()
    parts = {
        "w1": "gate",
        "w2": "down",
        "w3": "up",
        "gate_proj": "gate",
        "up_proj": "up",
        "down_proj": "down",
    }
    for name, values in tensors.items():
        single = re.fullmatch(r"(blk\.\d+\.).*experts\.(\d+)\.(\w+)\.weight", name)
        fused = re.fullmatch(r"(blk\.\d+\.).*experts\.(gate_up|down)_proj(_bias)?", name)
        if single:
            experts.setdefault(f"{single[1]}ffn_{parts[single[3]]}_exps.weight", {})[int(single[2])] = values
        elif fused and kind == "gpt_oss":
            leaf = "bias" if fused[3] else "weight"
            values = values if fused[3] else values.swapaxes(1, 2)
            split = (
                {"gate": values[:, ::2], "up": values[:, 1::2]} if fused[2] == "gate_up" else {"down": values}
            )
            found |= {f"{fused[1]}ffn_{part}_exps.{leaf}": each for part, each in split.items()}
        else:
            found[name] = values
    return found | {name: np.stack([each[i] for i in range(len(each))]) for name, each in experts.items()}


def _changed(config: Mapping[str, Any], tensors: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for each, values in tensors.items():
        heads = re.search(r"attn_([qk])\.(weight|bias)$", each)
        if heads and name in ("llama", "granite"):
            n = config["num_attention_heads" if heads[1] == "q" else "num_key_value_heads"]
            halves = values.reshape(n, 2, len(values) // n // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if name.startswith("gemma") and each.endswith("norm.weight"):
            values = values + np.float32(1)
        found[each] = values
    return found


def _rope(config: Mapping[str, Any], name: str, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """The keys of rotary positions; factors of frequencies go to `tensors`."""
    rope = config["rope_parameters"]
    found: dict[str, Any] = {}
    if "full_attention" in rope:
        found[f"{name}.rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    n_heads = config["num_attention_heads"]
    size = config.get("qk_rope_head_dim") or config.get("head_dim") or config["hidden_size"] // n_heads
    rotated = int(size * rope.get("partial_rotary_factor", 1.0))
    found |= {f"{name}.rope.freq_base": rope["rope_theta"], f"{name}.rope.dimension_count": rotated}
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        found |= {f"{name}.rope.scaling.type": kind, f"{name}.rope.scaling.factor": rope["factor"]}
    if "mscale_all_dim" in rope:
        found[f"{name}.rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if original := rope.get("original_max_position_embeddings"):
        found[f"{name}.rope.scaling.original_context_length"] = original
    if kind == "longrope":
        for which in ("long", "short"):
            tensors[f"rope_factors_{which}.weight"] = np.array(rope[f"{which}_factor"], np.float32)
        scale = config["max_position_embeddings"] / original
        found[f"{name}.rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
    if kind == "llama3":
        tensors["rope_freqs.weight"] = _llama3_factors(rope, rotated)
    return found


def _llama3_factors(rope: Mapping[str, Any], size: int) -> np.ndarray:
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors: list[float] = []
    for i in range(size // 2):
        turns = (
            rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-2 * i / size) / (2 * math.pi)
        )
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())
