"""Splits the blocks of GGUF's types into planes, the arrays of a packed form, and unpacks planes to numbers.

A row of a tensor is a run of blocks, each with its scales and its codes. families/packed_form.py says what a
plane is and in which order it has its inputs; most types differ from it in nothing but where the bytes are.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from orca_jax.gguf_file import BLOCKS

Bytes = npt.NDArray[Any]
Planes = dict[str, np.ndarray]

_RUN = 32  # inputs whose nibbles are neighbours in `codes`
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_TWICE_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def plane(kind: str, name: str, rows: Bytes) -> np.ndarray:
    """The plane `name` [n, ...] of rows [n, bytes] of the type `kind`."""
    _, n_bytes = BLOCKS[kind]
    return _flat(_PLANES[kind][name](rows.reshape(len(rows), -1, n_bytes)))


def split(kind: str, rows: Bytes) -> Planes:
    """All planes of rows [n, bytes] of the type `kind`."""
    return {name: plane(kind, name, rows) for name in _PLANES[kind]}


def plane_of_block(kind: str, name: str) -> tuple[int, np.dtype]:
    """A plane's elements in a block, and their dtype."""
    one = plane(kind, name, np.zeros((1, BLOCKS[kind][1]), np.uint8))
    return one.shape[1], one.dtype


def unpacked(kind: str, planes: Mapping[str, np.ndarray]) -> npt.NDArray[np.float32]:
    """The numbers [n, inputs] of planes: what llama.cpp computes with, to the bit."""
    codes = planes["codes"]
    if codes.dtype == np.int8:
        return _times(planes["scales"].astype(np.float32), codes.astype(np.float32))
    numbers = _joined(codes & 15, codes >> 4)
    if kind in ("IQ4_NL", "MXFP4"):
        table = np.array(_IQ4_NL if kind == "IQ4_NL" else _TWICE_FP4, np.float32)
        scales = planes["scales"]
        wide = np.ldexp(np.float32(1), scales.astype(np.int32) - 128) if kind == "MXFP4" else scales
        return _times(wide.astype(np.float32), table[numbers])
    if kind in ("Q5_0", "Q5_1", "Q5_K"):
        numbers |= np.unpackbits(planes["high"], axis=1, bitorder="little") << 4
    if kind == "Q6_K":
        high = planes["high"].reshape(len(codes), -1, 1, 8)
        pairs = (high >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)) & 3
        numbers |= pairs.reshape(numbers.shape) << 4
        scales = _times(planes["super_scales"].astype(np.float32), planes["scales"].astype(np.float32))
        return _times(scales, numbers.astype(np.float32) - 32)
    wide = numbers.astype(np.float32)
    if kind in ("Q4_K", "Q5_K"):
        scales, mins = _six_bits(planes["scales"])
        scales = _times(planes["super_scales"].astype(np.float32), scales)
        mins = _times(planes["super_mins"].astype(np.float32), mins)
        return _times(scales, wide) - np.repeat(mins, _RUN, axis=1)
    scales = planes["scales"].astype(np.float32)
    if kind in ("Q4_1", "Q5_1"):
        return _times(scales, wide) + np.repeat(planes["mins"].astype(np.float32), _RUN, axis=1)
    return _times(scales, wide - (16 if kind == "Q5_0" else 8))


def _flat(plane: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(plane).reshape(len(plane), -1)


def _paired(numbers: Bytes) -> Bytes:
    """Nibbles [..., 32], as bytes of inputs j and j + 16."""
    return numbers[..., : _RUN // 2] | (numbers[..., _RUN // 2 :] << 4)


def _joined(low: Bytes, high: Bytes) -> Bytes:
    """The inputs [n, in] of both halves of the bytes [n, in / 2]."""
    shape = (len(low), -1, _RUN // 2)
    return np.concatenate([low.reshape(shape), high.reshape(shape)], axis=2).reshape(len(low), -1)


def _times(scales: np.ndarray, numbers: np.ndarray) -> npt.NDArray[np.float32]:
    """Multiply each scale [n, blocks] by the numbers [n, in] of its block."""
    blocks = numbers.reshape(*scales.shape, -1)
    return (scales[..., None] * blocks).reshape(numbers.shape)


def _six_bits(packed: Bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Eight scales and eight minima of 6 bits, from each twelve bytes: [n, in / 32] both."""
    low, mid, high = np.split(packed.reshape(len(packed), -1, 12), 3, axis=2)
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=2)
    mins = np.concatenate([mid & 63, (high >> 4) | ((mid >> 6) << 4)], axis=2)
    return _flat(scales).astype(np.float32), _flat(mins).astype(np.float32)


def _in_runs(bytes_: Bytes) -> Bytes:
    """The codes of Q4_K and Q5_K: 32 bytes have one run in their low halves, the next in the high."""
    chunks = bytes_.reshape(*bytes_.shape[:2], 4, 1, 32)
    return _paired(np.concatenate([chunks & 15, chunks >> 4], axis=3))


def _ones_in_runs(blocks: Bytes) -> Bytes:
    """The high bits of Q5_K: bit r of byte l is of input l of run r."""
    bits = (blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8).reshape(8, 1)) & 1
    return np.packbits(bits, axis=3, bitorder="little")


def _low_of_q6_k(blocks: Bytes) -> Bytes:
    """The low halves of Q6_K: 64 bytes have runs 0 and 1, then runs 2 and 3, for each half of a block."""
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 2, 32)
    return _paired(np.concatenate([low & 15, low >> 4], axis=3))


def _high_of_q6_k(blocks: Bytes) -> Bytes:
    """The high bits of Q6_K: 32 bytes have two bits of each of four runs, for each half of a block."""
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    pairs = high >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1) & 3
    eighths = pairs.reshape(*pairs.shape[:-1], 4, 8)
    return eighths[..., 0, :] | eighths[..., 1, :] << 2 | eighths[..., 2, :] << 4 | eighths[..., 3, :] << 6


def _bytes(first: int, end: int | None = None, dtype: Any = np.uint8) -> Callable[[Bytes], np.ndarray]:
    """Bytes of each block as they are."""
    return lambda blocks: np.ascontiguousarray(blocks[..., first:end]).view(dtype)


def _half(at: int) -> Callable[[Bytes], np.ndarray]:
    """The float16 at byte `at` of each block."""
    return _bytes(at, at + 2, "<f2")


_K_SCALES = {"scales": _bytes(4, 16), "super_scales": _half(0), "super_mins": _half(2)}
_PLANES: Mapping[str, Mapping[str, Callable[[Bytes], np.ndarray]]] = {
    "Q4_0": {"codes": _bytes(2), "scales": _half(0)},
    "Q4_1": {"codes": _bytes(4), "scales": _half(0), "mins": _half(2)},
    "Q5_0": {"codes": _bytes(6), "high": _bytes(2, 6), "scales": _half(0)},
    "Q5_1": {"codes": _bytes(8), "high": _bytes(4, 8), "scales": _half(0), "mins": _half(2)},
    "Q8_0": {"codes": _bytes(2, None, np.int8), "scales": _half(0)},
    "Q4_K": {"codes": lambda blocks: _in_runs(blocks[..., 16:]), **_K_SCALES},
    "Q5_K": {"codes": lambda blocks: _in_runs(blocks[..., 48:]), "high": _ones_in_runs, **_K_SCALES},
    "Q6_K": {
        **{"codes": _low_of_q6_k, "high": _high_of_q6_k},
        **{"scales": _bytes(192, 208, np.int8), "super_scales": _half(208)},
    },
    "IQ4_NL": {"codes": _bytes(2), "scales": _half(0)},
    "MXFP4": {"codes": _bytes(1), "scales": _bytes(0, 1)},
}
