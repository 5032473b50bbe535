"""Weights in the packed forms of families/packed_form.py: what their bytes mean, and products with them.

A product unpacks the weight as it is needed, in a fusion on accelerators and a few rows at a time on CPUs,
where the product of an iteration (layers.Matmul.packed) does not take the packed bytes themselves.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from orca_jax.families.packed_form import PackedForm

Dense = Callable[[Array, Array], Array]  # x [T, in] times a weight [out, in]: [T, out]

# A part of a weight that is unpacked at a time on a CPU, so that it stays in a core's cache.
_PART_BYTES = 1 << 20


def product_unpacked(x: Array, form: PackedForm, planes: Mapping[str, Array], dense: Dense) -> Array:
    """x [T, in] times a packed weight [*out, in], by the product with the unpacked weight: [T, out]."""
    if form.integer_inputs:
        x = rounded(x)
    matrices = {name: _as_matrix(form, name, plane) for name, plane in planes.items()}
    by_rows, whole = partial(_product_by_rows, form, dense), partial(_product_of_whole, form, dense)
    return lax.platform_dependent(x, matrices, cpu=by_rows, default=whole)


def _as_matrix(form: PackedForm, name: str, plane: Array) -> Array:
    """A plane with all axes of outputs as one."""
    is_by_row = form.block is None and name in ("scales", "zeros", "mins")
    return plane.reshape(-1) if is_by_row else plane.reshape(-1, plane.shape[-1])


def _product_of_whole(form: PackedForm, dense: Dense, x: Array, planes: dict[str, Array]) -> Array:
    return dense(x, unpacked(form, planes, x.dtype))


def _product_by_rows(form: PackedForm, dense: Dense, x: Array, planes: dict[str, Array]) -> Array:
    """Multiply by a part of the weight's rows at a time; the last part may overlap the one before it."""
    n_rows, n_in = planes["codes"].shape[0], x.shape[1]
    height = max(1, _PART_BYTES // (n_in * x.dtype.itemsize))
    if n_rows <= 2 * height:
        return _product_of_whole(form, dense, x, planes)

    def add(i: Array, y: Array) -> Array:
        first = jnp.minimum(i * height, n_rows - height)
        part = {name: lax.dynamic_slice_in_dim(plane, first, height) for name, plane in planes.items()}
        return lax.dynamic_update_slice_in_dim(y, _product_of_whole(form, dense, x, part), first, 1)

    return lax.fori_loop(0, -(-n_rows // height), add, jnp.zeros((x.shape[0], n_rows), x.dtype))


def rounded(x: Array) -> Array:
    """Activations [T, in] rounded to eight bits, with one scale a token."""
    wide = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(wide).max(axis=1, keepdims=True), 1e-30) / 127
    return (jnp.round(wide / scale) * scale).astype(x.dtype)


def rounded_to_float8(x: Array, scale: Array | None) -> Array:
    """Activations [T, in] rounded to float8_e4m3fn, times `scale`, or a scale for each token."""
    wide = x.astype(jnp.float32)
    greatest = float(jnp.finfo(jnp.float8_e4m3fn).max)
    if scale is None:
        scale = jnp.maximum(jnp.abs(wide).max(axis=1, keepdims=True), 1e-30) / greatest
    numbers = jnp.clip(wide / scale, -greatest, greatest).astype(jnp.float8_e4m3fn)
    return (numbers.astype(jnp.float32) * scale).astype(x.dtype)


def encoded_planes(form: PackedForm, dense: Array) -> dict[str, Array]:
    """The planes of a dense weight [*out, in], rounded to nearest. Traced.

    Zeros are those of a symmetric form, and inputs keep their order.
    """
    assert form.fixed is None, form
    zero = form.zero if isinstance(form.zero, int) else 8 if form.code == "nibbles" else 0
    *out, n_in = dense.shape
    block = form.block or n_in
    blocks = dense.astype(jnp.float32).reshape(*out, n_in // block, block)
    greatest = {"nibbles": 7.0, "int8": 127.0, "fp8": 448.0}[form.code]
    scales = _narrow(form, jnp.abs(blocks).max(axis=-1) / greatest)
    wide = _wide(form, scales)[..., None]
    numbers = blocks / jnp.where(wide > 0, wide, 1)
    planes = {"scales": scales.reshape(tuple(out)) if form.block is None else scales}
    if form.zero == "zeros":
        planes["zeros"] = jnp.full(planes["scales"].shape, zero, jnp.int8)
    if form.ordered:
        planes["order"] = jnp.arange(n_in, dtype=jnp.int32)
    if form.code == "fp8":
        codes = jnp.clip(numbers, -greatest, greatest).astype(jnp.float8_e4m3fn)
        return {"codes": lax.bitcast_convert_type(codes, jnp.uint8).reshape(dense.shape), **planes}
    rounded = jnp.clip(jnp.round(numbers), -greatest - (form.code == "nibbles"), greatest)
    if form.code == "int8":
        return {"codes": rounded.astype(jnp.int8).reshape(dense.shape), **planes}
    runs = (rounded + zero).astype(jnp.uint8).reshape(*out, n_in // 32, 2, 16)
    codes = runs[..., 0, :] | runs[..., 1, :] << 4
    return {"codes": codes.reshape(*out, n_in // 2), **planes}


def random_planes(form: PackedForm, shape: tuple[int, ...], key: Array) -> dict[str, Array]:
    """Planes of a random weight, whose codes are uniform and whose numbers are about 0.02. Traced."""
    planes: dict[str, Array] = {}
    greatest = max(map(abs, form.table)) if form.table else 2.0 ** (form.bits - 1)
    for name, array in form.arrays(shape, 1, jnp.float32).items():
        if name in ("codes", "high") or (name == "scales" and form.scale == "six_bits"):
            key, own = jax.random.split(key)
            planes[name] = lax.bitcast_convert_type(jax.random.bits(own, array.shape, jnp.uint8), array.dtype)
            continue
        if name == "order":
            planes[name] = jnp.arange(array.shape[0], dtype=jnp.int32)
            continue
        step = 0.02 / greatest / (32 if name.startswith("super") and form.scale == "six_bits" else 1)
        if name == "input_scales":
            value: Any = 0.05
        elif name == "zeros":
            value = 8 if form.code == "nibbles" else 0
        elif name == "super_mins":
            value = step * 8
        elif name == "mins":
            value = _narrow(form, jnp.float32(-step * 8))
        elif name == "scales" and form.scale == "e8m0":
            value = 120
        elif name == "scales" and form.superblock:
            value = 1
        else:
            value = jnp.float16(step) if name == "super_scales" else _narrow(form, jnp.float32(step))
        planes[name] = jnp.full(array.shape, value, array.dtype)
    return planes


def _narrow(form: PackedForm, scales: Array) -> Array:
    if form.scale == "bfloat16":
        return lax.bitcast_convert_type(scales.astype(jnp.bfloat16), jnp.uint16)
    return scales.astype(form.scale)


def unpacked(form: PackedForm, planes: Mapping[str, Array], dtype: DTypeLike) -> Array:
    """Unpack a weight's planes to its numbers [*out, in], computed in float32."""
    codes = _codes(form, planes)
    *out, n_in = codes.shape
    block = form.block or n_in
    codes = codes.reshape(*out, n_in // block, block)
    if form.table:
        numbers = _looked_up(form.table, codes)
    elif form.zero == "zeros":
        zeros = planes["zeros"].astype(jnp.int32).reshape(*out, -1, 1)
        numbers = (codes.astype(jnp.int32) - zeros).astype(jnp.float32)
    else:
        zero = form.zero if isinstance(form.zero, int) else 0
        numbers = codes.astype(jnp.float32) - zero
    scales, mins = _scales(form, planes)
    numbers = numbers * scales.reshape(*out, -1, 1)
    if mins is not None:
        numbers = numbers + mins.reshape(*out, -1, 1)
    return numbers.reshape(*out, n_in).astype(dtype)


def _codes(form: PackedForm, planes: Mapping[str, Array]) -> Array:
    """The codes [*out, in]: int8, float8_e4m3fn, or uint8 of four to six bits."""
    codes = planes["codes"]
    if form.code == "int8":
        return codes
    if form.code == "fp8":
        return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    *out, n_bytes = codes.shape
    runs = codes.reshape(*out, n_bytes // 16, 1, 16)
    shifts = jnp.array([[0], [4]], jnp.uint8)
    low = ((runs >> shifts) & 15).reshape(*out, 2 * n_bytes)
    if not form.high:
        return low
    if form.high == 1:
        high = (planes["high"][..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
    else:
        runs = planes["high"].reshape(*out, n_bytes // 16, 1, 8)
        high = (runs >> jnp.array([[0], [2], [4], [6]], jnp.uint8)) & 3
    return low | high.reshape(low.shape) << 4


def _looked_up(table: tuple[int, ...], codes: Array) -> Array:
    """The number of each code, by comparisons: they fuse, and a gather of bytes does not."""
    numbers = jnp.zeros(codes.shape, jnp.float32)
    for code, number in enumerate(table):
        numbers = jnp.where(codes == code, float(number), numbers)
    return numbers


def _scales(form: PackedForm, planes: Mapping[str, Array]) -> tuple[Array, Array | None]:
    """The scale and the added number of each block, float32."""
    scales = planes["scales"]
    if form.scale == "six_bits":
        of_blocks, of_mins = _six_bits(scales)
        scale, least = (
            numbers.astype(jnp.float32) * planes[by].astype(jnp.float32)[..., None]
            for numbers, by in ((of_blocks, "super_scales"), (of_mins, "super_mins"))
        )
        return scale, -least
    if form.scale == "q6_k":
        per_super = scales.reshape(*scales.shape[:-1], -1, 16).astype(jnp.float32)
        return per_super * planes["super_scales"].astype(jnp.float32)[..., None], None
    if form.scale == "e8m0":
        return _half_power(scales), None
    mins = planes.get("mins")
    return _wide(form, scales), None if mins is None else _wide(form, mins)


def _wide(form: PackedForm, numbers: Array) -> Array:
    if form.scale == "bfloat16":
        numbers = lax.bitcast_convert_type(numbers, jnp.bfloat16)
    return numbers.astype(jnp.float32)


def _half_power(exponents: Array) -> Array:
    """2 ** (exponent - 128) as float32; the least two are subnormal."""
    wide = exponents.astype(jnp.uint32)
    bits = jnp.where(wide < 2, jnp.uint32(1 << 21) << wide, (wide - 1) << 23)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _six_bits(packed: Array) -> tuple[Array, Array]:
    """The eight scales and the eight minima [..., n, 8] of each superblock's 12 bytes, [..., 12 n].

    Scales 0 to 3 are the low six bits of bytes 0 to 3, minima 0 to 3 those of bytes 4 to 7. The others have
    their low four bits in a nibble of bytes 8 to 11 and their high two at the top of bytes 0 to 7.
    """
    first, second, third = (
        part[..., 0, :] for part in jnp.split(packed.reshape(*packed.shape[:-1], -1, 3, 4), 3, axis=-2)
    )
    scales = jnp.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=-1)
    mins = jnp.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=-1)
    return scales, mins
