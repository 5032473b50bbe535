"""Quantized checkpoints written by hand, as their formats are published: tensors, and what they mean."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Tensors = dict[str, np.ndarray]

SMALL_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# One matrix [out, in] of a module: its tensors by the last part of their names, and its numbers in float32.
Written = tuple[Tensors, np.ndarray]


@dataclass(frozen=True)
class Format:
    """A way to store matrices: `section` is the quantization_config, `write` makes one of random codes.

    `write` takes the shape [out, in], a generator of the numbers, and one of the order of inputs, which is
    the same for the matrices of one product.
    """

    section: Mapping[str, Any]
    write: Callable[[tuple[int, int], np.random.Generator, np.random.Generator], Written]
    layers_alone: bool = True


def words(codes: np.ndarray, bits: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """Unsigned codes [rows, n] in int32 words along the rows: code order[i] of a word in its i-th bits."""
    n = 32 // bits
    order = order or tuple(range(n))
    padded = np.zeros((len(codes), -(-codes.shape[1] // n) * n), np.uint32)
    padded[:, : codes.shape[1]] = codes
    packed = np.zeros((len(codes), padded.shape[1] // n), np.uint32)
    for i, place in enumerate(order):
        packed |= padded[:, place::n] << np.uint32(bits * i)
    return packed.view(np.int32)


def scales_of(shape: tuple[int, ...], greatest: float, rng: np.random.Generator, dtype: Any) -> np.ndarray:
    """Scales of numbers of at most about 0.1."""
    return (0.1 * rng.uniform(0.5, 1, shape) / greatest).astype(dtype)


def numbers_of(codes: Any, zeros: Any, scales: np.ndarray, group: int) -> np.ndarray:
    """(code - zero) * scale in float32, of codes [out, in], and zeros and scales [out, groups]."""
    wide = codes.astype(np.float32) - np.repeat(np.asarray(zeros, np.float32), group, 1)[:, : codes.shape[1]]
    return wide * np.repeat(scales.astype(np.float32), group, 1)[:, : codes.shape[1]]


def compressed(
    format_: str,
    weights: Mapping[str, Any],
    write: Callable[[tuple[int, int], np.random.Generator, np.random.Generator], Written],
    inputs: Mapping[str, Any] | None = None,
) -> Format:
    """A format of compressed-tensors, as llm-compressor writes its section."""
    usual = {"dynamic": False, "symmetric": True, "type": "int", "observer": "minmax", "actorder": None}
    group = {
        "targets": ["Linear"],
        "weights": {**usual, "group_size": None, "block_structure": None, **weights},
        "input_activations": inputs,
        "output_activations": None,
    }
    section = {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }
    return Format(section, write)


def packed_words(bits: int, group: int | None, *, zeros: bool = False, ordered: bool = False) -> Format:
    """pack-quantized."""

    def write(shape: tuple[int, int], rng: np.random.Generator, order: np.random.Generator) -> Written:
        n_out, n_in = shape
        size = group or n_in
        half = 1 << bits - 1
        codes = rng.integers(-half, half, shape)
        scales = scales_of((n_out, n_in // size), half, rng, BF16)
        middles = rng.integers(-3, 4, scales.shape) if zeros else np.zeros(scales.shape, int)
        tensors = {
            "weight_packed": words((codes + half).astype(np.uint32), bits),
            "weight_scale": scales,
            "weight_shape": np.array(shape, np.int64),
        }
        if zeros:
            tensors["weight_zero_point"] = np.ascontiguousarray(words((middles + half).T, bits).T)
        numbers = numbers_of(codes, middles, scales, size)
        if ordered:
            g_idx = order.permutation(np.arange(n_in) // size)
            tensors["weight_g_idx"] = g_idx.astype(np.int32)
            wide = codes - middles[:, g_idx]
            numbers = wide.astype(np.float32) * scales.astype(np.float32)[:, g_idx]
        return tensors, numbers

    weights = {"num_bits": bits, "strategy": "group" if group else "channel", "group_size": group}
    weights |= {"symmetric": not zeros} | ({"actorder": "group"} if ordered else {})
    return compressed("pack-quantized", weights, write)


def int_quantized(
    group: int | None, *, zeros: bool = False, inputs: Mapping[str, Any] | None = None
) -> Format:
    """int-quantized."""

    def write(shape: tuple[int, int], rng: np.random.Generator, _: np.random.Generator) -> Written:
        n_out, n_in = shape
        codes = rng.integers(-128, 128, shape).astype(np.int8)
        scales = scales_of((n_out, n_in // (group or n_in)), 128, rng, BF16)
        middles = (rng.integers(-9, 9, scales.shape) if zeros else np.zeros(scales.shape)).astype(np.int8)
        tensors = {"weight": codes, "weight_scale": scales} | (
            {"weight_zero_point": middles} if zeros else {}
        )
        return tensors, numbers_of(codes, middles, scales, group or n_in)

    weights = {"num_bits": 8, "strategy": "group" if group else "channel", "group_size": group}
    return compressed("int-quantized", weights | {"symmetric": not zeros}, write, inputs)


def float_codes(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=shape).astype(FP8)


def by_block(codes: np.ndarray, scales: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Codes [out, in] times the scales of their blocks."""
    wide = np.repeat(np.repeat(scales.astype(np.float32), rows, 0), columns, 1)
    return codes.astype(np.float32) * wide[: codes.shape[0], : codes.shape[1]]


def float_quantized(strategy: str, inputs: Mapping[str, Any] | None = None) -> Format:
    """float-quantized: by tensor, by channel, or by blocks of 16 by 32."""
    block = [16, 32] if strategy == "block" else None

    def write(shape: tuple[int, int], rng: np.random.Generator, _: np.random.Generator) -> Written:
        rows, columns = block or ((1, shape[1]) if strategy == "channel" else shape)
        codes = float_codes(shape, rng)
        sizes = (-(-shape[0] // rows), -(-shape[1] // columns))
        scales = scales_of(sizes, 2, rng, np.float32 if block else BF16)
        tensors = {"weight": codes, "weight_scale": scales[0] if strategy == "tensor" else scales}
        if inputs is not None and not inputs["dynamic"]:
            tensors["input_scale"] = np.array([0.02], np.float32)
        return tensors, by_block(codes, scales, rows, columns)

    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": block}
    return compressed("float-quantized", weights, write, inputs)


def gptq(
    bits: int, group: int, *, symmetric: bool = True, ordered: bool = False, version: str = "gptq"
) -> Format:
    """GPTQ, as AutoGPTQ (version gptq) and GPTQModel (either) write it."""

    def write(shape: tuple[int, int], rng: np.random.Generator, order: np.random.Generator) -> Written:
        n_out, n_in = shape
        size = n_in if group < 0 else group
        codes = rng.integers(0, 1 << bits, (n_in, n_out))
        scales = scales_of((n_in // size, n_out), 1 << bits - 1, rng, np.float16)
        zeros = np.full(scales.shape, 1 << bits - 1)
        if not symmetric:
            zeros += rng.integers(-3, 4, zeros.shape)
        g_idx = np.arange(n_in) // size
        if ordered:
            g_idx = order.permutation(g_idx)
        stored_zeros = zeros - (version == "gptq")
        tensors = {
            "qweight": np.ascontiguousarray(words(codes.T, bits).T),
            "qzeros": words(stored_zeros, bits),
            "scales": scales,
            "g_idx": g_idx.astype(np.int32),
        }
        wide = (codes - zeros[g_idx]).astype(np.float32) * scales.astype(np.float32)[g_idx]
        return tensors, np.ascontiguousarray(wide.T)

    section = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": ordered,
    }
    return Format(
        section | {"checkpoint_format": version, "damp_percent": 0.1, "true_sequential": True}, write
    )


def awq(group: int) -> Format:
    """AWQ in the order of GEMM's kernels."""

    def write(shape: tuple[int, int], rng: np.random.Generator, _: np.random.Generator) -> Written:
        n_out, n_in = shape
        codes = rng.integers(0, 16, (n_in, n_out))
        scales = scales_of((n_in // group, n_out), 8, rng, np.float16)
        zeros = rng.integers(0, 16, scales.shape)
        tensors = {
            "qweight": words(codes, 4, _AWQ_ORDER),
            "qzeros": words(zeros, 4, _AWQ_ORDER),
            "scales": scales,
        }
        wide = (codes - np.repeat(zeros, group, 0)) * np.repeat(scales.astype(np.float32), group, 0)
        return tensors, np.ascontiguousarray(wide.T.astype(np.float32))

    section = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Format(section | {"modules_to_not_convert": None}, write)


def fp8_of_blocks(rows: int, columns: int) -> Format:
    """FP8 of DeepSeek and transformers."""

    def write(shape: tuple[int, int], rng: np.random.Generator, _: np.random.Generator) -> Written:
        codes = float_codes(shape, rng)
        scales = scales_of((-(-shape[0] // rows), -(-shape[1] // columns)), 2, rng, np.float32)
        return {"weight": codes, "weight_scale_inv": scales}, by_block(codes, scales, rows, columns)

    section = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return Format(section | {"weight_block_size": [rows, columns]}, write)


def fp8_of_tensors() -> Format:
    """FP8 with one scale for a matrix and one for its inputs, as vLLM's `fp8` method reads it."""

    def write(shape: tuple[int, int], rng: np.random.Generator, _: np.random.Generator) -> Written:
        codes, scale = float_codes(shape, rng), scales_of((), 2, rng, np.float32)
        tensors = {
            "weight": codes,
            "weight_scale": np.asarray(scale),
            "input_scale": np.array(0.02, np.float32),
        }
        return tensors, codes.astype(np.float32) * scale

    section = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    return Format(section, write)


def rounded_inputs(kind: str, *, dynamic: bool = True) -> dict[str, Any]:
    """The section of activations that are rounded."""
    strategy = "token" if dynamic else "tensor"
    return {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": dynamic, "strategy": strategy}


FORMATS: dict[str, Format] = {
    "w4a16": packed_words(4, 32),
    "w4a16-zeros": packed_words(4, 32, zeros=True),
    "w4a16-channel": packed_words(4, None),
    "w4a16-order": packed_words(4, 32, ordered=True),
    "w8a16": packed_words(8, 32),
    "w8a16-channel-zeros": packed_words(8, None, zeros=True),
    "int8": int_quantized(32, zeros=True),
    "w8a8": int_quantized(None, inputs=rounded_inputs("int")),
    "fp8-channel": float_quantized("channel"),
    "fp8-dynamic": float_quantized("channel", rounded_inputs("float")),
    "fp8-static": float_quantized("tensor", rounded_inputs("float", dynamic=False)),
    "fp8-block": float_quantized("block"),
    "gptq": gptq(4, 32),
    "gptq-v2": gptq(4, 32, symmetric=False, version="gptq_v2"),
    "gptq-zeros": gptq(4, 64, symmetric=False),
    "gptq-order": gptq(4, 32, ordered=True),
    "gptq-8": gptq(8, 32),
    "gptq-8-order-zeros": gptq(8, -1, symmetric=False, ordered=True),
    "awq": awq(32),
    "deepseek": fp8_of_blocks(16, 32),
    "fp8-tensor": fp8_of_tensors(),
}
