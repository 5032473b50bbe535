"""Writes tiny checkpoints in Hugging Face's form, valid and broken, without a library."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "U8": np.dtype("u1"),
}

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 11,
    "n_positions": 6,
    "n_embd": 4,
    "n_layer": 2,
    "n_head": 2,
    "n_inner": 5,
    "activation_function": "gelu_new",
    "bos_token_id": 0,
    "eos_token_id": 10,
}
OPT = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 11,
    "max_position_embeddings": 6,
    "hidden_size": 4,
    "word_embed_proj_dim": 3,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 5,
    "bos_token_id": 2,
    "eos_token_id": 2,
}

Tensors = dict[str, np.ndarray]


def gpt2_tensors(config: Mapping[str, Any] = GPT2, *, prefix: str = "transformer.", seed: int = 0) -> Tensors:
    """Random float32 tensors under the names of GPT2LMHeadModel."""
    rng = np.random.default_rng(seed)
    h, f = config["n_embd"], config["n_inner"]
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (config["vocab_size"], h),
        "wpe.weight": (config["n_positions"], h),
    }
    for i in range(config["n_layer"]):
        for name, out, into in (
            ("attn.c_attn", 3 * h, h),
            ("attn.c_proj", h, h),
            ("mlp.c_fc", f, h),
            ("mlp.c_proj", h, f),
        ):
            shapes |= {f"h.{i}.{name}.weight": (into, out), f"h.{i}.{name}.bias": (out,)}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{name}.weight": (h,), f"h.{i}.{name}.bias": (h,)}
    shapes |= {"ln_f.weight": (h,), "ln_f.bias": (h,)}
    tensors = {prefix + name: rng.standard_normal(shape).astype("<f4") for name, shape in shapes.items()}
    if config.get("tie_word_embeddings") is False:
        tensors["lm_head.weight"] = rng.standard_normal(shapes["wte.weight"]).astype("<f4")
    return tensors


def opt_tensors(config: Mapping[str, Any] = OPT, *, prefix: str = "model.decoder.", seed: int = 0) -> Tensors:
    """Random float32 tensors under the names of OPTForCausalLM."""
    rng = np.random.default_rng(seed)
    h, f, e = config["hidden_size"], config["ffn_dim"], config["word_embed_proj_dim"]
    bias = config.get("enable_bias", True)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config["vocab_size"], e),
        "embed_positions.weight": (config["max_position_embeddings"] + 2, h),
    }
    if e != h:
        shapes |= {"project_in.weight": (h, e), "project_out.weight": (e, h)}
    norms = [f"layers.{i}.{name}" for i in range(config["num_hidden_layers"]) for name in _OPT_NORMS]
    if config.get("do_layer_norm_before", True) and not config.get("_remove_final_layer_norm", False):
        norms.append("final_layer_norm")
    for name in norms:
        shapes |= {f"{name}.weight": (h,), f"{name}.bias": (h,)}
    for i in range(config["num_hidden_layers"]):
        for name, out, into in (
            *((f"self_attn.{name}_proj", h, h) for name in ("k", "v", "q", "out")),
            ("fc1", f, h),
            ("fc2", h, f),
        ):
            shapes[f"layers.{i}.{name}.weight"] = (out, into)
            if bias:
                shapes[f"layers.{i}.{name}.bias"] = (out,)
    tensors = {prefix + name: rng.standard_normal(shape).astype("<f4") for name, shape in shapes.items()}
    if config.get("tie_word_embeddings") is False:
        tensors["lm_head.weight"] = rng.standard_normal(shapes["embed_tokens.weight"]).astype("<f4")
    return tensors


_OPT_NORMS = ("self_attn_layer_norm", "final_layer_norm")


def header_and_data(tensors: Tensors) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a safetensors file of these tensors, each in its dtype."""
    header: dict[str, Any] = {}
    data = b""
    for name, values in tensors.items():
        dtype = next(key for key, value in DTYPES.items() if value == values.dtype)
        raw = np.ascontiguousarray(values).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return header, data


def file_bytes(header: Any, data: bytes) -> bytes:
    """A safetensors file; `header` may be the JSON text itself."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_tensors(path: Path, tensors: Tensors) -> None:
    path.write_bytes(file_bytes(*header_and_data(tensors)))


def write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values))


def write_checkpoint(
    directory: Path, config: Mapping[str, Any], tensors: Tensors, *, n_files: int = 1
) -> Path:
    """config.json and the tensors, in one file or in several with an index."""
    directory.mkdir(exist_ok=True)
    write_json(directory / "config.json", config)
    if n_files == 1:
        write_tensors(directory / "model.safetensors", tensors)
        return directory
    weight_map: dict[str, str] = {}
    for i in range(n_files):
        file = f"model-{i + 1:05}-of-{n_files:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[i::n_files]}
        write_tensors(directory / file, part)
        weight_map |= dict.fromkeys(part, file)
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return directory
