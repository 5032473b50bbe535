"""The macros that each of the CPU's C files is compiled with, by the model's sizes. Knows no JAX."""

import struct
from typing import Literal

from orca_jax.families.packed_form import PackedForm
from orca_jax.native.compiler import build_ahead

BITS = {"float32": 32, "bfloat16": 16}
CODES = {"int8": 1, "fp8": 2}  # of a cache of eight bits; the numbers of eight_bits.h's macros


def dtype_of_cache(stored: str) -> str:
    """Dtype, or code of eight bits, of the numbers in a cache that is stored as `stored`."""
    return {"uint16": "bfloat16", "uint8": "fp8"}.get(stored, stored)


def linear_sizes(x_dtype: str, weight_dtype: str, steady: bool = False) -> dict[str, int]:
    """Macros of linear.c. With `steady` no token is in a remainder that is computed in another order."""
    bits = {"X_BITS": BITS[x_dtype], "WEIGHT_BITS": BITS[weight_dtype]}
    return bits | ({"REST": 0, "TURNS": 1} if steady else {})


def grouped_sizes(x_dtype: str, weight_dtype: str, steady: bool = False) -> dict[str, int]:
    """Macros of grouped.c and mixture.c."""
    return linear_sizes(x_dtype, weight_dtype, steady) | ({"FEW": 0} if steady else {})


# The numbers of packed_panel.h's macros.
_SCALES = {"float16": 1, "bfloat16": 2, "float32": 3, "e8m0": 4, "six_bits": 5, "q6_k": 6}
_MINIMA = {"mins": 1, "zeros": 2}
PACKED_RUN = 32  # the inputs of a packed product are a multiple of this, and so are those of a scale
PACKED_WIDTH = 16  # the least outputs of a packed product
PACKED_MOST = 1 << 16  # inputs whose integer products, at most 255 times 127 each, may be added up in 32 bits


def packed_sizes(form: PackedForm, x_dtype: str, steady: bool = False) -> dict[str, int]:
    """Macros of packed_linear.c. With `steady` one token alone is computed as it is among others."""
    words = struct.unpack("<4i", bytes(number & 0xFF for number in form.table)) if form.table else ()
    sizes = {
        "X_BITS": BITS[x_dtype],
        "CODE": 4 if form.code == "nibbles" else 8,
        "HIGH": form.high,
        "SCALE": _SCALES[form.scale],
        "MINIMA": _MINIMA.get(str(form.zero), 0),
        "ZERO": form.zero if isinstance(form.zero, int) else 0,
        "TABLE": int(bool(form.table)),
        "FLOATS": int(form.code == "fp8"),
        "TOKEN_SCALE": int(form.integer_inputs),
    } | {f"TABLE_{i}": word for i, word in enumerate(words)}
    return sizes | ({"BY_ROWS": 0} if steady and form.code == "fp8" else {})


def attention_sizes(
    head_size: int, block_size: int, q_dtype: str, kv_dtype: str, value_size: int | None = None
) -> dict[str, int]:
    """Macros of split_attention.c; `value_size` is given where values are the first elements of keys.

    `kv_dtype` is a dtype or one of CODES.
    """
    bits = {"Q_BITS": BITS[q_dtype], "KV_BITS": 8 if kv_dtype in CODES else BITS[kv_dtype]}
    bits |= {"KV_FP8": 1} if kv_dtype == "fp8" else {}
    sizes = {"HEAD_SIZE": head_size, "BLOCK_SIZE": block_size, **bits}
    return sizes if value_size is None else sizes | {"VALUE_SIZE": value_size}


def place_sizes(dtype: str, kv_dtype: str) -> dict[str, int]:
    """Macros of place.c, for heads of `dtype` and a cache of it or of one of CODES."""
    return {"X_BITS": BITS[dtype]} | ({"CODE": CODES[kv_dtype]} if kv_dtype in CODES else {})


def build_all_ahead(
    head_size: int,
    block_size: int,
    dtype: str,
    *,
    kv_code: str | None = None,
    experts: Literal["plain", "other"] | None,
    value_size: int | None = None,
    recurrent: bool = False,
    linear_attention: bool = False,
    steady: bool = False,
) -> None:
    """Start building, in parallel, all operations that a model of this dtype uses on a CPU, if any.

    `kv_code` is the code of a cache of eight bits.
    """
    if dtype not in BITS:
        return
    kv_dtype = kv_code or dtype
    build_ahead("split_attention", **attention_sizes(head_size, block_size, dtype, kv_dtype, value_size))
    if value_size is None:
        build_ahead("place", **place_sizes(dtype, kv_dtype))
    elif not steady:
        build_ahead("plain_latent", Q_BITS=BITS[dtype], KV_BITS=BITS[dtype])
    build_ahead("linear", **linear_sizes(dtype, dtype, steady))
    build_ahead("token_choice")
    if recurrent:
        build_ahead("causal_convolution")
    if linear_attention:
        build_ahead("linear_attention")
    if experts:
        build_ahead("mixture" if experts == "plain" else "grouped", **grouped_sizes(dtype, dtype, steady))
