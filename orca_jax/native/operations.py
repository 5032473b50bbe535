"""The CPU's operations, each with the names that are set in its C file. Knows no JAX."""

from typing import Literal

from orca_jax.native.compiler import build_ahead

BITS = {"float32": 32, "bfloat16": 16}


def dtype_of_cache(stored: str) -> str:
    """The dtype of a cache's numbers: uint16 holds the bits of bfloat16."""
    return "bfloat16" if stored == "uint16" else stored


def linear_sizes(x_dtype: str, weight_dtype: str, steady: bool = False) -> dict[str, int]:
    """The names that linear.c needs."""
    bits = {"X_BITS": BITS[x_dtype], "WEIGHT_BITS": BITS[weight_dtype]}
    return bits | ({"REST": 0, "TURNS": 1} if steady else {})


def grouped_sizes(x_dtype: str, weight_dtype: str, steady: bool = False) -> dict[str, int]:
    """The names that grouped.c and mixture.c need."""
    return linear_sizes(x_dtype, weight_dtype, steady) | ({"FEW": 0} if steady else {})


def attention_sizes(
    head_size: int, block_size: int, q_dtype: str, kv_dtype: str, value_size: int | None = None
) -> dict[str, int]:
    """The names that split_attention.c needs; `value_size` where values are the first elements of keys."""
    bits = {"Q_BITS": BITS[q_dtype], "KV_BITS": BITS[kv_dtype]}
    sizes = {"HEAD_SIZE": head_size, "BLOCK_SIZE": block_size, **bits}
    return sizes if value_size is None else sizes | {"VALUE_SIZE": value_size}


def place_sizes(dtype: str) -> dict[str, int]:
    """The names that place.c needs."""
    return {"X_BITS": BITS[dtype]}


def plain_latent_sizes(q_dtype: str, kv_dtype: str) -> dict[str, int]:
    """The names that plain_latent.c needs."""
    return {"Q_BITS": BITS[q_dtype], "KV_BITS": BITS[kv_dtype]}


def build_all_ahead(
    head_size: int,
    block_size: int,
    dtype: str,
    *,
    experts: Literal["plain", "other"] | None,
    value_size: int | None = None,
    steady: bool = False,
) -> None:
    """Begin to build, side by side, what a CPU uses for a model of this dtype; nothing for other dtypes."""
    if dtype not in BITS:
        return
    build_ahead("split_attention", **attention_sizes(head_size, block_size, dtype, dtype, value_size))
    if value_size is None:
        build_ahead("place", **place_sizes(dtype))
    elif not steady:
        build_ahead("plain_latent", **plain_latent_sizes(dtype, dtype))
    build_ahead("linear", **linear_sizes(dtype, dtype, steady))
    build_ahead("token_choice")
    if experts:
        build_ahead("mixture" if experts == "plain" else "grouped", **grouped_sizes(dtype, dtype, steady))
