"""Packed weights for tests: planes of random bytes, and their numbers said once more, number by number."""

import math

import ml_dtypes
import numpy as np

from orca_jax.families.packed_form import GGUF_FORMS, PackedForm, fp8, w4, w8, w8a8

EVERY_FORM = {
    **GGUF_FORMS,
    "w4": w4(32),
    "w4-bfloat16": w4(128, scale="bfloat16"),
    "w4-zeros": w4(64, zeros=True),
    "w4-channel": w4(None, scale="float32"),
    "w8": w8(None, scale="float32"),
    "w8-zeros": w8(128, zeros=True, scale="bfloat16"),
    "w8a8": w8a8(),
    "fp8": fp8(None),
    "fp8-blocks": fp8(128),
}


def random_planes(form: PackedForm, shape: tuple[int, ...], seed: int) -> dict[str, np.ndarray]:
    """Planes of a weight of this shape, with numbers of about 0.05."""
    rng = np.random.default_rng(seed)
    planes: dict[str, np.ndarray] = {}
    for name, array in form.arrays(shape, np.float32).items():
        if name in ("super_scales", "super_mins"):
            size = 3e-5 if form.scale == "q6_k" else 1e-4
            planes[name] = (size * rng.uniform(0.5, 1.5, array.shape)).astype(np.float16)
        elif name in ("scales", "mins") and form.superblock is None:
            planes[name] = _scales(form, name, array.shape, rng)
        elif name == "zeros":
            planes[name] = rng.integers(0, 17 if form.code == "nibbles" else 3, array.shape).astype(np.int8)
        elif form.code == "fp8" and name == "codes":
            planes[name] = rng.normal(size=array.shape).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        else:
            span = np.iinfo(array.dtype)
            planes[name] = rng.integers(span.min, span.max, array.shape, array.dtype, endpoint=True)
    return planes


def _scales(form: PackedForm, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if form.scale == "e8m0":
        return rng.integers(120, 123, shape).astype(np.uint8)
    greatest = {"fp8": 1, "int8": 64}.get(form.code, 2.0 ** (form.bits - 1))
    numbers = rng.uniform(0.02, 0.08, shape) / (max(map(abs, form.table)) / 2 if form.table else greatest)
    if name == "mins":
        numbers *= -greatest
    if form.scale == "bfloat16":
        return numbers.astype(ml_dtypes.bfloat16).view(np.uint16)
    return numbers.astype(form.scale)


def literal_numbers(form: PackedForm, planes: dict[str, np.ndarray]) -> np.ndarray:
    """The numbers of planes [rows, ...] in float32, input by input as families/packed_form.py says."""
    n_rows, width = planes["codes"].shape
    n_in = 2 * width if form.code == "nibbles" else width
    found = np.empty((n_rows, n_in), np.float32)
    for row in range(n_rows):
        of_row = {name: plane[row] for name, plane in planes.items()}
        for i in range(n_in):
            found[row, i] = _number(form, of_row, i, n_in)
    return found


def _number(form: PackedForm, row: dict[str, np.ndarray], i: int, n_in: int) -> np.float32:
    block, run, j = i // (form.block or n_in), i // 32, i % 32
    code = (
        row["codes"][i] if form.code != "nibbles" else row["codes"][16 * run + j % 16] >> (j // 16 * 4) & 15
    )
    if form.code == "fp8":
        code = code.view(ml_dtypes.float8_e4m3fn)
    if form.high == 1:
        code |= (row["high"][i // 8] >> i % 8 & 1) << 4
    if form.high == 2:
        code |= (row["high"][8 * run + j % 8] >> j // 8 * 2 & 3) << 4
    number = np.float32(form.table[code] if form.table else code)

    if form.scale == "six_bits":
        packed = [int(byte) for byte in row["scales"][i // 256 * 12 :][:12]]
        b = i % 256 // 32
        if b < 4:
            scale, least = packed[b] & 63, packed[4 + b] & 63
        else:
            scale = packed[4 + b] & 15 | packed[b - 4] >> 6 << 4
            least = packed[4 + b] >> 4 | packed[b] >> 6 << 4
        scale = np.float32(row["super_scales"][i // 256]) * np.float32(scale)
        return scale * number - np.float32(row["super_mins"][i // 256]) * np.float32(least)

    scale = row["scales"][block] if form.block else row["scales"][()]
    if form.scale == "q6_k":
        scale = np.float32(row["super_scales"][i // 256]) * np.float32(scale)
    elif form.scale == "e8m0":
        scale = np.float32(math.ldexp(1.0, int(scale) - 128))
    elif form.scale == "bfloat16":
        scale = np.float32(scale.view(ml_dtypes.bfloat16))
    if form.zero == "zeros":
        number -= np.float32(row["zeros"][block] if form.block else row["zeros"])
    elif form.zero == "mins":
        return np.float32(scale) * number + np.float32(row["mins"][block])
    else:
        number -= np.float32(form.zero)
    return np.float32(scale) * number
