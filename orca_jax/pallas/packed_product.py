"""Products of few tokens with packed weights on GPUs, in a Triton kernel that unpacks in registers.

A thread block has up to `_TOKENS` tokens, `_ROWS` rows of the weight and one of the equal parts of its
inputs. It reads the codes of some inputs at a time and multiplies by them at once, so that no unpacked weight
is ever in memory. XLA adds the parts up. With more than `MOST_TOKENS` tokens it costs little to unpack first,
and the kernel would unpack as often as it has tiles of tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from orca_jax.families.packed_form import PackedForm

MOST_TOKENS = 256
_TOKENS = 64  # in a thread block
_ROWS = 64  # of a weight in a thread block: fewer read the tokens more often, from the second cache
_LEAST_TOKENS = 16  # of Triton's products
_STEPS = (128, 64, 32)  # inputs at a time
_LEAST_STEPS = 4  # of a thread block
_SUM_BYTES = 8  # to write a part's sum and read it again; all parts' have at most half as many as the codes
_RUN = 32  # inputs whose nibbles stand together (families/packed_form.py)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The static sizes of a launch: a weight [n_out, n_in] in `n_parts` parts, of `step` inputs at a time."""

    n_tokens: int
    n_out: int
    n_in: int
    step: int
    n_parts: int

    @property
    def tile(self) -> int:
        """Tokens of a thread block, of which the last ones may be missing: a power of two."""
        return min(_TOKENS, max(_LEAST_TOKENS, 1 << (self.n_tokens - 1).bit_length()))

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tiles of tokens, of rows, and parts. The tiles that read the same codes follow one another."""
        return -(-self.n_tokens // self.tile), -(-self.n_out // _ROWS), self.n_parts


def unsupported(x: jax.Array, form: PackedForm) -> str | None:
    """Why the kernel cannot multiply x [T, in] by a weight in this form; None if it can."""
    if x.dtype.name not in ("bfloat16", "float16"):
        return f"x is {x.dtype.name}, not bfloat16 or float16"
    if len(x) > MOST_TOKENS:
        return f"there are {len(x)} tokens, more than {MOST_TOKENS}"
    if form.integer_inputs:
        return "activations are rounded to integers"
    if x.shape[1] % (form.superblock or _STEPS[-1]):
        return f"{x.shape[1]} inputs are no multiple of {form.superblock or _STEPS[-1]}"
    block = form.block
    if block is not None and (block & (block - 1) or block < (16 if form.code == "nibbles" else _RUN)):
        return f"a scale belongs to {block} inputs"
    return None


def packed_product(
    x: jax.Array,
    form: PackedForm,
    planes: Mapping[str, jax.Array],
    *,
    n_cores: int = 132,
    interpret: bool = False,
) -> jax.Array:
    """x [T, in] times a packed weight [*out, in] whose planes are those of `form`: [T, out] in x's dtype.

    Each number of the weight is rounded to x's dtype, bfloat16 or float16, and sums are float32. An FP8 code
    of NaN counts as 480. `n_cores` is the GPU's number of streaming multiprocessors; `interpret` runs the
    kernel on the CPU. `unsupported` must have no reason.
    """
    assert unsupported(x, form) is None, unsupported(x, form)
    n_tokens, n_in = x.shape
    matrices = {
        name: plane.reshape(-1, 1)
        if form.block is None and name != "codes"
        else plane.reshape(-1, plane.shape[-1])
        for name, plane in planes.items()
    }
    n_out = len(matrices["codes"])
    step = next(each for each in _STEPS if n_in % each == 0)
    most = max(1, matrices["codes"].shape[1] // (2 * _SUM_BYTES * n_tokens))
    n_blocks = -(-n_out // _ROWS) * -(-n_tokens // _TOKENS)
    n_parts = _n_parts(n_blocks, n_in // step, n_cores, most)
    shape = _Shape(n_tokens, n_out, n_in, step, n_parts)
    return _launch(shape, form, x, matrices, interpret)


def _n_parts(n_blocks: int, n_steps: int, n_cores: int, most: int) -> int:
    """Parts of the inputs, at most `most`: as many as give each core two thread blocks of several steps."""
    n = 1
    while (
        n * n_blocks < 2 * n_cores
        and 2 * n <= most
        and n_steps % (2 * n) == 0
        and n_steps // (2 * n) >= _LEAST_STEPS
    ):
        n *= 2
    return n


@partial(jax.jit, static_argnames=("shape", "form", "interpret"))  # lowers once in a model with many layers
def _launch(
    shape: _Shape, form: PackedForm, x: jax.Array, planes: dict[str, jax.Array], interpret: bool
) -> jax.Array:
    names = tuple(planes)
    out = pl.pallas_call(
        partial(_kernel, shape, form, names),
        out_shape=jax.ShapeDtypeStruct((shape.n_parts, shape.n_tokens, shape.n_out), jnp.float32),
        grid=shape.grid,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="packed_product",
    )(x, *planes.values())
    return out.sum(axis=0).astype(x.dtype)


def _kernel(shape: _Shape, form: PackedForm, names: tuple[str, ...], x: Any, *refs: Any) -> None:
    """Multiply a tile of tokens by `_ROWS` rows and a part of the inputs."""
    *planes, out = refs
    row, part = pl.program_id(1) * _ROWS + jnp.arange(_ROWS), pl.program_id(2)
    weight = _Rows(form, dict(zip(names, planes, strict=True)), jnp.minimum(row, shape.n_out - 1))
    token = pl.program_id(0) * shape.tile + jnp.arange(shape.tile)
    is_token, known = token < shape.n_tokens, jnp.minimum(token, shape.n_tokens - 1)
    n_steps = shape.n_in // (shape.step * shape.n_parts)

    def add(i: jax.Array, sums: jax.Array) -> jax.Array:
        first = (part * n_steps + i) * shape.step
        for inputs, numbers in weight.unpacked(first, shape.step):
            tokens = plgpu.load(x.at[known[:, None], inputs[None, :]], mask=is_token[:, None], other=0.0)
            sums += lax.dot_general(
                tokens,
                numbers.astype(tokens.dtype),
                (((1,), (1,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
        return sums

    sums = lax.fori_loop(0, n_steps, add, jnp.zeros((shape.tile, _ROWS), jnp.float32))
    plgpu.store(
        out.at[part, token[:, None], row[None, :]],
        sums,
        mask=is_token[:, None] & (row < shape.n_out)[None, :],
    )


class _Rows:
    """Rows [R] of a packed weight, of which `planes` are references to all."""

    def __init__(self, form: PackedForm, planes: Mapping[str, Any], row: jax.Array) -> None:
        self._form, self._planes, self._row = form, planes, row

    def unpacked(self, first: jax.Array, n: int) -> list[tuple[jax.Array, jax.Array]]:
        """The inputs from `first` on, `n` of them: their places [k] and numbers [R, k], float32, in pairs."""
        if self._form.code != "nibbles":
            place = jnp.arange(n)
            return [(first + place, self._numbers(self._bytes(first + place), first, n, n))]
        half = jnp.arange(n // 2)
        codes = self._load("codes", first // 2 + half)
        run, place = half // 16, half % 16
        pairs = list[tuple[jax.Array, jax.Array]]()
        for offset, four_bits in ((0, codes & 15), (16, codes >> 4)):
            whole = four_bits | self._high(first, offset, n) if self._form.high else four_bits
            numbers = self._numbers(whole, first + offset, n, n // 2)
            pairs.append((first + _RUN * run + offset + place, numbers))
        return pairs

    def _load(self, name: str, at: jax.Array) -> jax.Array:
        """The elements `at` [k] of each row of a plane: [R, k]."""
        return plgpu.load(self._planes[name].at[self._row[:, None], at[None, :]])

    def _bytes(self, at: jax.Array) -> jax.Array:
        """Codes of eight bits: int8, or the numbers of FP8 as float32."""
        codes = self._load("codes", at)
        if self._form.code == "int8":
            return codes
        # The bits of e4m3 moved into float16's are its number over 256, subnormal numbers too.
        wide = codes.astype(jnp.uint16)
        bits = (wide & 0x80) << 8 | (wide & 0x7F) << 7
        return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * 256

    def _high(self, first: jax.Array, offset: int, n: int) -> jax.Array:
        """The bits above the four of `n // 2` codes, which are at `offset` in each run: [R, n // 2]."""
        place = jnp.arange(n // 2)
        if self._form.high == 1:  # a byte has eight inputs
            byte = jnp.arange(n // 16)
            packed = self._load("high", first // 8 + offset // 8 + byte // 2 * 4 + byte % 2)
            bits = _repeated(packed, 8) >> (place % 8).astype(jnp.uint8)[None, :] & 1
        else:  # byte j of a run has the inputs j, j + 8, j + 16 and j + 24
            packed = self._load("high", first // 4 + jnp.arange(n // 4))
            by_run = packed.reshape(len(packed), -1, 1, 8)
            both = jnp.broadcast_to(by_run, (*by_run.shape[:2], 2, 8)).reshape(len(packed), -1)
            bits = both >> (2 * (offset // 8 + place % 16 // 8)).astype(jnp.uint8)[None, :] & 3
        return bits << 4

    def _numbers(self, codes: jax.Array, first: jax.Array, n: int, n_codes: int) -> jax.Array:
        """The numbers of `codes` [R, n_codes], whose blocks are those of the `n` inputs from `first` on."""
        form = self._form
        if form.table:
            numbers = _looked_up(form.table, codes)
        else:
            numbers = codes.astype(jnp.float32)
            if isinstance(form.zero, int) and form.zero:
                numbers -= form.zero
        span = n if form.block is None else min(n, max(form.block, _RUN))
        block = (
            jnp.zeros(1, jnp.int32)
            if form.block is None
            else (first + span * jnp.arange(n // span)) // form.block
        )

        def each(of_blocks: jax.Array) -> jax.Array:
            return _repeated(of_blocks, n_codes // of_blocks.shape[1])

        if form.zero == "zeros":
            numbers -= each(self._load("zeros", block).astype(jnp.float32))
        scales, added = self._scales(block)
        numbers *= each(scales)
        return numbers if added is None else numbers + each(added)

    def _wide(self, name: str, block: jax.Array) -> jax.Array:
        """Scales or minima of blocks [k] that are stored each by itself: [R, k], float32."""
        stored = self._load(name, block)
        if self._form.scale == "bfloat16":
            return lax.bitcast_convert_type(stored.astype(jnp.uint32) << 16, jnp.float32)
        if self._form.scale == "e8m0":  # the least two exponents are those of subnormal numbers
            exponent = stored.astype(jnp.uint32)
            bits = jnp.where(exponent < 2, jnp.uint32(1 << 21) << exponent, (exponent - 1) << 23)
            return lax.bitcast_convert_type(bits, jnp.float32)
        return stored.astype(jnp.float32)

    def _scales(self, block: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The scales of blocks [k], and what is added to their numbers: [R, k], float32."""
        form = self._form
        if form.scale == "six_bits":
            at = block // 8 * 12 + block % 4
            first, second, third = (self._load("scales", at + offset) for offset in (0, 4, 8))
            is_low = (block % 8 < 4)[None, :]
            scale = jnp.where(is_low, first & 63, (third & 15) | (first >> 6) << 4)
            least = jnp.where(is_low, second & 63, (third >> 4) | (second >> 6) << 4)
            scale, least = (
                part.astype(jnp.float32) * self._load(by, block // 8).astype(jnp.float32)
                for part, by in ((scale, "super_scales"), (least, "super_mins"))
            )
            return scale, -least
        scales = self._wide("scales", block)
        if form.scale == "q6_k":
            scales *= self._load("super_scales", block // 16).astype(jnp.float32)
        return scales, self._wide("mins", block) if form.zero == "mins" else None


def _looked_up(table: tuple[int, ...], codes: jax.Array) -> jax.Array:
    numbers = jnp.zeros(codes.shape, jnp.float32)
    for code, number in enumerate(table):
        numbers = jnp.where(codes == code, float(number), numbers)
    return numbers


def _repeated(blocks: jax.Array, n: int) -> jax.Array:
    """Repeat each of the elements [R, k] n times in a row: [R, k n]."""
    if blocks.shape[1] == 1:
        return jnp.broadcast_to(blocks, (len(blocks), n))
    return jnp.broadcast_to(blocks[:, :, None], (*blocks.shape, n)).reshape(len(blocks), -1)
