"""Weights in the packed forms of families/packed_form.py, and what their bytes mean."""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from orca_jax.families.packed_form import PackedForm


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
