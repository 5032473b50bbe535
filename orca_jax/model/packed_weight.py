"""Weights in the packed forms of families/packed_form.py: what their bytes mean, and products with them.

A product unpacks the weight as it is needed, in a fusion on accelerators and a few rows at a time on CPUs,
where the product of an iteration (layers.Matmul.packed) does not take the packed bytes themselves.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from orca_jax.families.packed_form import MXFP4, PackedForm

Dense = Callable[[Array, Array], Array]  # x [T, in] times a weight [out, in]: [T, out]

# A part of a weight that is unpacked at a time on a CPU, so that it stays in a core's cache.
_PART_BYTES = 1 << 20
_OF_BLOCKS = ("scales", "zeros", "mins")  # planes with one element for each block


def product_unpacked(x: Array, form: PackedForm, planes: Mapping[str, Array], dense: Dense) -> Array:
    """x [T, in] times a packed weight [*out, in], by the product with the unpacked weight: [T, out]."""
    if form.integer_inputs:
        x = rounded(x)
    matrices = {name: _as_matrix(form, name, plane) for name, plane in planes.items()}
    by_rows, whole = partial(_product_by_rows, form, dense), partial(_product_of_whole, form, dense)
    return lax.platform_dependent(x, matrices, cpu=by_rows, default=whole)


def _as_matrix(form: PackedForm, name: str, plane: Array) -> Array:
    """A plane with all axes of outputs as one."""
    is_by_row = form.block is None and name in _OF_BLOCKS
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


def product_of_codes(x: Array, form: PackedForm, planes: Mapping[str, Array]) -> Array | None:
    """product_unpacked for accelerators, where each row of eight-bit codes has one scale; None elsewhere.

    The scale multiplies the product, so XLA reads the codes in the product itself. With `integer_inputs` it
    multiplies integers.
    """
    if form.block is not None or form.code == "nibbles" or form.zero != 0 or form.table:
        return None
    codes = _codes(form, planes).reshape(-1, x.shape[1])
    scales = _wide(form, planes["scales"]).reshape(-1)
    by_inputs = (((1,), (1,)), ((), ()))
    if form.integer_inputs:
        integers, of_tokens = _in_eight_bits(x)
        sums = lax.dot_general(integers.astype(jnp.int8), codes, by_inputs, preferred_element_type=jnp.int32)
        return (sums.astype(jnp.float32) * of_tokens * scales).astype(x.dtype)
    sums = lax.dot_general(x, codes.astype(x.dtype), by_inputs, preferred_element_type=jnp.float32)
    return (sums * scales).astype(x.dtype)


def rounded(x: Array) -> Array:
    """Activations [T, in] rounded to eight bits, with one scale a token."""
    integers, scale = _in_eight_bits(x)
    return (integers * scale).astype(x.dtype)


def _in_eight_bits(x: Array) -> tuple[Array, Array]:
    """Activations [T, in] as integers from -127 to 127, and each token's scale [T, 1], both float32."""
    wide = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(wide).max(axis=1, keepdims=True), 1e-30) / 127
    return jnp.round(wide / scale), scale


def rounded_to_float8(x: Array, scale: Array | None) -> Array:
    """Activations [T, in] rounded to float8_e4m3fn, times `scale`, or a scale for each token."""
    wide = x.astype(jnp.float32)
    greatest = float(jnp.finfo(jnp.float8_e4m3fn).max)
    if scale is None:
        scale = jnp.maximum(jnp.abs(wide).max(axis=1, keepdims=True), 1e-30) / greatest
    numbers = jnp.clip(wide / scale, -greatest, greatest).astype(jnp.float8_e4m3fn)
    return (numbers.astype(jnp.float32) * scale).astype(x.dtype)


def encoded_planes(form: PackedForm, dense: Array) -> dict[str, Array]:
    """Round a dense weight [*out, in] to the nearest numbers of the form: its planes. Traced.

    A block's scale fits its greatest number, or where it has a minimum or a zero its range.
    """
    *out, n_in = dense.shape
    blocks = dense.astype(jnp.float32).reshape(*out, -1, form.block or n_in)
    size, least, most = jnp.abs(blocks).max(axis=-1), blocks.min(axis=-1), blocks.max(axis=-1)
    n_steps = 2**form.bits - 1
    if isinstance(form.zero, str):
        if form.zero == "zeros" or form.superblock:  # such blocks have the number 0
            least, most = jnp.minimum(least, 0), jnp.maximum(most, 0)
        scales = (most - least) / n_steps
    else:
        at_most = {"nibbles": n_steps / 2, "int8": 127.0, "fp8": 448.0}[form.code]
        scales = size / (max(map(abs, form.table)) if form.table else at_most)
    planes = _scale_planes(form, scales, least)
    scale, mins = (None if each is None else each.reshape(scales.shape) for each in _scales(form, planes))
    assert scale is not None
    divisor = jnp.where(scale == 0, 1, scale)
    numbers = (blocks if mins is None else blocks - mins[..., None]) / divisor[..., None]
    first = -128 if form.code == "int8" else 0  # the least code
    if form.code == "fp8":
        codes = jnp.clip(numbers, -448, 448).astype(jnp.float8_e4m3fn)
        codes = lax.bitcast_convert_type(codes, jnp.uint8)
    elif form.table:
        codes = _nearest(form.table, numbers)
    else:
        zero: Any = form.zero if isinstance(form.zero, int) else 0
        if form.zero == "zeros":
            of_block = jnp.clip(jnp.round(first - least / divisor), first, first + n_steps)
            planes["zeros"] = of_block.astype(jnp.int8)
            zero = of_block[..., None]
        codes = jnp.clip(jnp.round(numbers) + zero, first, first + n_steps)
        codes = codes.astype(jnp.int8 if form.code == "int8" else jnp.uint8)
    codes = codes.reshape(*out, n_in)
    if form.code != "nibbles":
        planes["codes"] = codes
    else:
        runs = (codes & 15).reshape(*out, n_in // 32, 2, 16)
        planes["codes"] = (runs[..., 0, :] | runs[..., 1, :] << 4).reshape(*out, n_in // 2)
    if form.high == 1:
        bits = (codes >> 4).reshape(*out, n_in // 8, 8) << jnp.arange(8, dtype=jnp.uint8)
        planes["high"] = bits.sum(axis=-1, dtype=jnp.uint8)
    elif form.high == 2:
        shifts = jnp.array([[0], [2], [4], [6]], jnp.uint8)
        bits = (codes >> 4).reshape(*out, n_in // 32, 4, 8) << shifts
        planes["high"] = bits.sum(axis=-2, dtype=jnp.uint8).reshape(*out, n_in // 4)
    if form.ordered:
        planes["order"] = jnp.arange(n_in, dtype=jnp.int32)
    if form.float_inputs == "static":  # of random weights alone
        planes["input_scales"] = jnp.full(tuple(out), 0.05, jnp.float32)
    by_row = form.block is None
    return {
        name: planes[name].reshape(tuple(out)) if by_row and name in _OF_BLOCKS else planes[name]
        for name in form.arrays(dense.shape, jnp.float32)
    }


def _scale_planes(form: PackedForm, scales: Array, least: Array) -> dict[str, Array]:
    """The planes of the scales [..., blocks] of a weight, and of its blocks' least numbers."""
    if form.scale == "six_bits":
        parts = [each.reshape(*each.shape[:-1], -1, 8) for each in (scales, -least)]
        supers = [(each.max(axis=-1) / 63).astype(jnp.float16) for each in parts]
        s, m = (_shares(*each, 0, 63).astype(jnp.uint8) for each in zip(parts, supers, strict=True))
        packed = jnp.concatenate(
            [
                s[..., :4] | s[..., 4:] >> 4 << 6,
                m[..., :4] | m[..., 4:] >> 4 << 6,
                s[..., 4:] & 15 | m[..., 4:] << 4,
            ],
            axis=-1,
        )
        packed = packed.reshape(*packed.shape[:-2], -1)
        return {"scales": packed, "super_scales": supers[0], "super_mins": supers[1]}
    if form.scale == "q6_k":
        parts_of_super = scales.reshape(*scales.shape[:-1], -1, 16)
        super_scales = (parts_of_super.max(axis=-1) / 127).astype(jnp.float16)
        shares = _shares(parts_of_super, super_scales, -128, 127).astype(jnp.int8)
        return {"scales": shares.reshape(scales.shape), "super_scales": super_scales}
    if form.scale == "e8m0":
        exponent = jnp.frexp(scales)[1]  # 2 ** exponent is at least the scale
        return {"scales": jnp.where(scales > 0, jnp.clip(exponent + 128, 2, 254), 0).astype(jnp.uint8)}
    planes = {"scales": _narrow(form, scales)}
    return {**planes, "mins": _narrow(form, least)} if form.zero == "mins" else planes


def _shares(parts: Array, whole: Array, least: int, most: int) -> Array:
    """The nearest whole factors [..., n, k] that make `parts` [..., n, k] of the steps `whole` [..., n]."""
    wide = whole.astype(jnp.float32)[..., None]
    return jnp.clip(jnp.round(parts / jnp.where(wide == 0, 1, wide)), least, most)


def _nearest(table: tuple[int, ...], numbers: Array) -> Array:
    """The code of the table's number that is nearest to each of `numbers`."""
    codes, distance = jnp.zeros(numbers.shape, jnp.uint8), jnp.full(numbers.shape, jnp.inf)
    for code, number in enumerate(table):
        away = jnp.abs(numbers - number)
        codes, distance = jnp.where(away < distance, jnp.uint8(code), codes), jnp.minimum(away, distance)
    return codes


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
    if table == MXFP4.table:
        # From 2 on, a code's bits are the first of a float32's exponent and mantissa: ten operations in place
        # of thirty.
        wide = codes.astype(jnp.uint32)
        size = wide & 7
        first = jnp.where(size > 1, size + 254, jnp.where(size == 1, jnp.uint32(254), jnp.uint32(0)))
        return lax.bitcast_convert_type(first << 22 | (wide & 8) << 28, jnp.float32)
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
    mins = planes.get("mins")
    return _wide(form, scales), None if mins is None else _wide(form, mins)


def _wide(form: PackedForm, stored: Array) -> Array:
    """Scales or minima as they are stored, in float32; not the two parts of six-bit ones."""
    if form.scale == "e8m0":
        return half_power(stored)
    if form.scale == "bfloat16":
        stored = lax.bitcast_convert_type(stored, jnp.bfloat16)
    return stored.astype(jnp.float32)


def half_power(exponents: Array) -> Array:
    """2 ** (exponent - 128) as float32; the least two are subnormal.

    Maxima in place of a comparison: for an H200, XLA wrote comparisons of all experts' scales to memory.
    """
    wide = exponents.astype(jnp.uint32)
    subnormal = jnp.uint32(1 << 21) << jnp.minimum(wide, 1)
    normal = (jnp.maximum(wide, 1) - 1) << 23
    return lax.bitcast_convert_type(jnp.maximum(normal, subnormal), jnp.float32)


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
