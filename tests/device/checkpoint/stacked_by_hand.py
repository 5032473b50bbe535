"""MaxText's and Tunix's arrays of the golden mixtures, stacked by hand from Hugging Face's tensors.

The transforms are those of MaxText's converter (checkpoint_conversion/utils/param_mapping.py) and of Tunix's
params.py; nothing is taken from orca_jax's tables.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util

Arrays = dict[str, np.ndarray]


def flipped(weight: np.ndarray, *heads: int) -> np.ndarray:
    """Transpose [out, in] to [in, out], with the outputs as heads."""
    return weight.T.reshape(weight.shape[1], *heads) if heads else weight.T


def each_expert(tensors: Arrays, name: str, number: int) -> np.ndarray:
    return np.stack([tensors[name.replace("{x}", str(x))].T for x in range(number)])


def attention(tensors: Arrays, place: str, config: dict[str, Any], scale: float = 1.0) -> Arrays:
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    query, key, value = (tensors[f"{place}{part}_proj.weight"] for part in "qkv")
    return {
        "query.kernel": flipped(query, -1, size) * np.float32(scale),
        "key.kernel": flipped(key, -1, size),
        "value.kernel": flipped(value, -1, size),
        "out.kernel": tensors[f"{place}o_proj.weight"].T.reshape(-1, size, config["hidden_size"]),
    }


def mixtral(tensors: Arrays, config: dict[str, Any], i: int) -> tuple[str, Arrays]:
    place, size = f"model.layers.{i}.", config["hidden_size"] // config["num_attention_heads"]
    moe, number = f"{place}block_sparse_moe.", config["num_local_experts"]
    found = attention(tensors, f"{place}self_attn.", config, scale=size**-0.5)
    return "layers", {f"self_attention.{name}": values for name, values in found.items()} | {
        "MoeBlock_0.gate.kernel": flipped(tensors[f"{moe}gate.weight"]),
        "MoeBlock_0.wi_0": each_expert(tensors, f"{moe}experts.{{x}}.w1.weight", number),
        "MoeBlock_0.wi_1": each_expert(tensors, f"{moe}experts.{{x}}.w3.weight", number),
        "MoeBlock_0.wo": each_expert(tensors, f"{moe}experts.{{x}}.w2.weight", number),
    }


def qwen3_moe(tensors: Arrays, config: dict[str, Any], i: int) -> tuple[str, Arrays]:
    place = f"model.layers.{i}."
    mlp, number = f"{place}mlp.", config["num_local_experts"]
    found = attention(tensors, f"{place}self_attn.", config) | {
        "query_norm.scale": tensors[f"{place}self_attn.q_norm.weight"],
        "key_norm.scale": tensors[f"{place}self_attn.k_norm.weight"],
    }
    return "layers", {f"self_attention.{name}": values for name, values in found.items()} | {
        "moe_block.gate.kernel": flipped(tensors[f"{mlp}gate.weight"]),
        "moe_block.wi_0": each_expert(tensors, f"{mlp}experts.{{x}}.gate_proj.weight", number),
        "moe_block.wi_1": each_expert(tensors, f"{mlp}experts.{{x}}.up_proj.weight", number),
        "moe_block.wo": each_expert(tensors, f"{mlp}experts.{{x}}.down_proj.weight", number),
    }


def gpt_oss(tensors: Arrays, config: dict[str, Any], i: int) -> tuple[str, Arrays]:
    place, size = f"model.layers.{i}.", config["head_dim"]
    heads, experts = f"{place}self_attn.", f"{place}mlp.experts."
    found = attention(tensors, heads, config) | {
        **{
            f"{name}.bias": tensors[f"{heads}{name[0]}_proj.bias"].reshape(-1, size)
            for name in ("query", "key", "value")
        },
        "out.bias": tensors[f"{heads}o_proj.bias"],
        "sinks": tensors[f"{heads}sinks"],
    }
    gate_up, bias = tensors[f"{experts}gate_up_proj"], tensors[f"{experts}gate_up_proj_bias"]
    return "layers", {f"GptOssAttention.{name}": values for name, values in found.items()} | {
        "GptOssMlp.gate.kernel": flipped(tensors[f"{place}mlp.router.weight"]),
        "GptOssMlp.gate.bias": tensors[f"{place}mlp.router.bias"],
        "GptOssMlp.wi_0": gate_up[..., ::2],
        "GptOssMlp.wi_1": gate_up[..., 1::2],
        "GptOssMlp.wi_0_bias": bias[..., ::2],
        "GptOssMlp.wi_1_bias": bias[..., 1::2],
        "GptOssMlp.wo": tensors[f"{experts}down_proj"],
        "GptOssMlp.wo_bias": tensors[f"{experts}down_proj_bias"],
    }


def deepseek(tensors: Arrays, config: dict[str, Any], i: int) -> tuple[str, Arrays]:
    place, n_heads = f"model.layers.{i}.", config["num_attention_heads"]
    heads, mlp = f"{place}self_attn.", f"{place}mlp."
    if config["q_lora_rank"] is None:
        queries = {"query.kernel": flipped(tensors[f"{heads}q_proj.weight"], n_heads, -1)}
    else:
        queries = {
            "wq_a.kernel": flipped(tensors[f"{heads}q_a_proj.weight"]),
            "q_norm.scale": tensors[f"{heads}q_a_layernorm.weight"],
            "wq_b.kernel": flipped(tensors[f"{heads}q_b_proj.weight"], n_heads, -1),
        }
    found = queries | {
        "wkv_a.kernel": flipped(tensors[f"{heads}kv_a_proj_with_mqa.weight"]),
        "kv_norm.scale": tensors[f"{heads}kv_a_layernorm.weight"],
        "wkv_b.kernel": flipped(tensors[f"{heads}kv_b_proj.weight"], n_heads, -1),
        "out.kernel": tensors[f"{heads}o_proj.weight"].T.reshape(n_heads, -1, config["hidden_size"]),
    }
    layer = {f"self_attention.{name}": values for name, values in found.items()}
    parts = {"wi_0": "gate", "wi_1": "up", "wo": "down"}
    if i < config["first_k_dense_replace"]:
        dense = {
            f"mlp.{name}.kernel": flipped(tensors[f"{mlp}{part}_proj.weight"]) for name, part in parts.items()
        }
        return "dense_layers", layer | dense
    block, number = "DeepSeekMoeBlock_0", config["n_routed_experts"]
    layer[f"{block}.MoeBlock_0.gate.kernel"] = flipped(tensors[f"{mlp}gate.weight"])
    if config["model_type"] == "deepseek_v3":
        layer[f"{block}.MoeBlock_0.gate.bias"] = tensors[f"{mlp}gate.e_score_correction_bias"]
    for name, part in parts.items():
        experts = each_expert(tensors, f"{mlp}experts.{{x}}.{part}_proj.weight", number)
        layer[f"{block}.MoeBlock_0.{name}"] = experts
        shared = tensors[f"{mlp}shared_experts.{part}_proj.weight"]
        layer[f"{block}.shared_experts.{name}.kernel"] = flipped(shared)
    return "moe_layers", layer


LAYERS: dict[str, Callable[[Arrays, dict[str, Any], int], tuple[str, Arrays]]] = {
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
}


def maxtext(tensors: Arrays, config: dict[str, Any], *, scanned: bool) -> Arrays:
    """MaxText's arrays. gpt-oss scans pairs of layers, DeepSeek layers with and without experts apart."""
    kinds: dict[str, list[Arrays]] = {}
    for i in range(config["num_hidden_layers"]):
        kind, layer = LAYERS[config["model_type"]](tensors, config, i)
        for ours, theirs in (("input", "pre_self_attention"), ("post_attention", "post_self_attention")):
            norm = tensors[f"model.layers.{i}.{ours}_layernorm.weight"]
            layer[f"{theirs}_layer_norm.scale"] = norm
        kinds.setdefault(kind, []).append(layer)
    found = {
        "token_embedder.embedding": tensors["model.embed_tokens.weight"],
        "decoder.decoder_norm.scale": tensors["model.norm.weight"],
        "decoder.logits_dense.kernel": flipped(tensors["lm_head.weight"]),
    }
    for kind, layers in kinds.items():
        group = 2 if scanned and config["model_type"] == "gpt_oss" else 1
        for within in range(group if scanned else len(layers)):
            place = f"decoder.{kind}." if scanned else f"decoder.{kind}_{within}."
            place += f"layers_{within}." if group > 1 else ""
            for name in layers[within]:
                every = [layer[name] for layer in layers[within::group]]
                axis = 0 if name == "DeepSeekMoeBlock_0.MoeBlock_0.gate.bias" else 1
                found[place + name] = np.stack(every, axis) if scanned else layers[within][name]
    return {f"params.params.{name}": values for name, values in found.items()}


def tunix(tensors: Arrays, config: dict[str, Any]) -> Arrays:
    """The arrays of Tunix's Qwen 3 with experts."""
    found = {
        "embedder.input_embedding": tensors["model.embed_tokens.weight"],
        "final_norm.w": tensors["model.norm.weight"],
        "lm_head.w": flipped(tensors["lm_head.weight"]),
    }
    for i in range(config["num_hidden_layers"]):
        place, there = f"layers.{i}.", f"model.layers.{i}."
        _, layer = qwen3_moe(tensors, config, i)
        found |= {
            **{f"{place}attn.{name[0]}_proj.w": layer[f"self_attention.{name}.kernel"] for name in
               ("query", "key", "value", "out")},
            f"{place}attn.q_norm.w": layer["self_attention.query_norm.scale"],
            f"{place}attn.k_norm.w": layer["self_attention.key_norm.scale"],
            f"{place}input_layernorm.w": tensors[f"{there}input_layernorm.weight"],
            f"{place}post_attention_layernorm.w": tensors[f"{there}post_attention_layernorm.weight"],
            f"{place}mlp.router.kernel": layer["moe_block.gate.kernel"],
            f"{place}mlp.gate_proj": layer["moe_block.wi_0"],
            f"{place}mlp.up_proj": layer["moe_block.wi_1"],
            f"{place}mlp.down_proj": layer["moe_block.wo"],
        }  # fmt: skip
    return {f"{name}.value": values for name, values in found.items()}


def save(directory: Path, arrays: Arrays) -> None:
    """Save the arrays with Orbax, as a tree by the parts of their names."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(directory, traverse_util.unflatten_dict(arrays, sep="."))
