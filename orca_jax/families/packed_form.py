"""Packed weights: codes of a few bits in blocks of inputs that share a scale, one form for all file formats.

A weight [*out, in] is held in *planes*, arrays whose rows are the weight's rows; each plane has one kind of
number for the whole row, and blocks follow one another in it in the order of inputs. Planes have no more
bytes than the file: codes are never widened, and GGUF's 6-bit scales stay 6-bit.

    codes    nibbles: uint8 [*out, in / 2]; in each run of 32 inputs byte j has input j in its low half and
             input j + 16 in its high one. int8: int8 [*out, in]. fp8: the bits of float8_e4m3fn, uint8
             [*out, in].
    high     a code's further bits, above the four of `codes`. One bit each: uint8 [*out, in / 8], bit i of
             byte b for input 8 b + i. Two bits each: uint8 [*out, in / 4]; in each run of 32 inputs byte j
             (of 8) has inputs j, j + 8, j + 16 and j + 24, from its lowest bits up.
    scales   one for each block: [*out, in / block], or [*out] where a whole row is a block. float16, float32,
             bfloat16 as its bits in uint16, or e8m0: a uint8 e means 2 ** (e - 128), half of MXFP4's scale,
             since its table has twice the numbers of FP4, so that they are whole.
             Q4_K, Q5_K: uint8 [*out, in / 256 * 12], the file's twelve bytes of eight 6-bit scales and eight
             6-bit minima. Q6_K: int8 [*out, in / 16].
    super_scales, super_mins    float16 [*out, in / 256], by which those are multiplied
    mins     like `scales`, added to each number of the block (Q4_1, Q5_1)
    zeros    int8, one for each scale: the code that means 0 (GPTQ, AWQ; for int8 codes less 128)
    order    int32 [in], the place of each of the planes' inputs among the weight's (GPTQ's act-order)
    input_scales   float32 [*out], all the same: the scale of activations that are rounded to FP8

With these a number is

    scale * code                  int8 and fp8; scale is super_scale * scale where there are super scales
    scale * (code - zero)         a `zero` of the form, or one of `zeros`
    scale * table[code]           IQ4_NL, MXFP4
    scale * code + min            Q4_1, Q5_1
    (super_scale * scale) * code - super_min * min      Q4_K, Q5_K

in float32, then rounded to the model's dtype. Bytes of zeros are numbers of zero in every form.

Rows may be in any order. Inputs are in the checkpoint's order (for attention's output projection, heads as in
the file), and are split over devices at whole blocks. A scale for a block of 128 rows and 128 inputs (FP8 of
DeepSeek) is repeated for each of the rows, and a scale for the whole tensor likewise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from orca_jax.families.weight_form import HeldArray, WeightForm

Code = Literal["nibbles", "int8", "fp8"]
Scale = Literal["float16", "bfloat16", "float32", "e8m0", "six_bits", "q6_k"]

_RUN = 32  # inputs whose nibbles, and whose pairs of high bits, stand together
SUPERBLOCK = 256  # inputs of a super scale

_SCALES: dict[Scale, Any] = {
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float32": np.float32,
    "e8m0": np.uint8,
    "six_bits": np.uint8,
    "q6_k": np.int8,
}

_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_TWICE_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True, slots=True)
class PackedForm:
    """One packed type; the module's documentation says what its planes hold.

    `block` inputs share a scale, None: all inputs of a row. `zero` is the code that means 0, "zeros" where
    each block has one, "mins" where each block has a minimum. With `integer_inputs` activations are rounded
    to int8 with one scale a token before the product (W8A8), with `float_inputs` to float8_e4m3fn, with one
    scale a token or the weight's static one; with `exact` no kernel may round them. With `ordered` input i of
    the planes is activation order[i].
    """

    name: str
    code: Code
    scale: Scale
    block: int | None
    high: Literal[0, 1, 2] = 0
    zero: int | Literal["zeros", "mins"] = 0
    table: tuple[int, ...] = ()
    integer_inputs: bool = False
    float_inputs: Literal["", "token", "static"] = ""
    ordered: bool = False
    exact: bool = False

    @property
    def superblock(self) -> int | None:
        """The inputs of a super scale; None without such scales."""
        return SUPERBLOCK if self.scale in ("six_bits", "q6_k") else None

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 + self.high if self.code == "nibbles" else 8

    @property
    def multiple(self) -> int:
        """The number of inputs, on each device, is a multiple of this."""
        of_codes = _RUN if self.code == "nibbles" else 1
        return math.lcm(of_codes, self.superblock or self.block or 1)

    @property
    def fixed(self) -> str | None:
        """Why a weight in this form cannot be replaced by new numbers; None if it can."""
        if self.float_inputs == "static":
            return (
                "weights cannot be replaced while activations are rounded with the scales of a checkpoint; "
                "load the model from a checkpoint that is not quantized, or with --quantization"
            )
        return None

    def arrays(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Mapping[str, HeldArray]:
        """The planes of a weight [*out, in]."""
        assert shape[-1] % self.multiple == 0, (self, shape)
        *out, inputs = shape
        every = tuple(range(len(shape)))

        def plane(width: int | None, of: Any) -> HeldArray:
            if width is None:
                return HeldArray(tuple(out), np.dtype(of), every[:-1])
            return HeldArray((*out, width), np.dtype(of), every)

        n_blocks = None if self.block is None else inputs // self.block
        planes = {
            "codes": plane(inputs // 2, np.uint8)
            if self.code == "nibbles"
            else plane(inputs, np.int8 if self.code == "int8" else np.uint8)
        }
        if self.high:
            planes["high"] = plane(inputs * self.high // 8, np.uint8)
        if self.superblock is None:
            planes["scales"] = plane(n_blocks, _SCALES[self.scale])
        else:
            n_super = inputs // self.superblock
            width = n_super * 12 if self.scale == "six_bits" else n_blocks
            planes["scales"] = plane(width, _SCALES[self.scale])
            planes["super_scales"] = plane(n_super, np.float16)
            if self.scale == "six_bits":
                planes["super_mins"] = plane(n_super, np.float16)
        if self.zero == "mins" and self.superblock is None:
            planes["mins"] = plane(n_blocks, _SCALES[self.scale])
        if self.zero == "zeros":
            planes["zeros"] = plane(n_blocks, np.int8)
        if self.float_inputs == "static":
            planes["input_scales"] = plane(None, np.float32)
        if self.ordered:
            planes["order"] = HeldArray((inputs,), np.dtype(np.int32), (len(shape) - 1,))
        return planes


@dataclass(frozen=True, slots=True)
class Joined:
    """A weight whose first axis counts matrices, in several forms, as where values have more bits than keys.

    Each of `forms` but the first has one matrix; the first has all matrices before them. `qkv` [G + 2, K D,
    H] has forms of queries, keys and values, or of queries with keys, and values. The arrays of form i are
    "i.codes" and so on, or "i" where it is dense.
    """

    forms: tuple[WeightForm, ...]

    @property
    def fixed(self) -> str | None:
        """Why the weight cannot be replaced: the first reason of a part."""
        return next((form.fixed for form in self.forms if form.fixed), None)

    @property
    def multiple(self) -> int:
        """The number of inputs, on each device, is a multiple of this."""
        return math.lcm(*(form.multiple for form in self.forms))

    def arrays(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Mapping[str, HeldArray]:
        """The arrays of all parts."""
        n_first = shape[0] - len(self.forms) + 1
        assert n_first > 0, (self, shape)
        return {
            f"{i}.{name}" if name else str(i): array
            for i, form in enumerate(self.forms)
            for name, array in form.arrays((1 if i else n_first, *shape[1:]), dtype).items()
        }


def joined(forms: Sequence[WeightForm]) -> WeightForm:
    """The form of a weight with `forms`, of which only the first may have several matrices."""
    first, *others = forms
    while others and others[0] == first:
        others.pop(0)
    return Joined((first, *others)) if others else first


def w4(group: int | None, *, zeros: bool = False, scale: Scale = "float16") -> PackedForm:
    """Four bits, a scale for `group` inputs (None: a row); 8 is the zero, or each group has one."""
    name = f"w4 in groups of {group}" if group else "w4 by channel"
    return PackedForm(name, "nibbles", scale, group, zero="zeros" if zeros else 8)


def w8(group: int | None, *, zeros: bool = False, scale: Scale = "float16") -> PackedForm:
    """Eight bits, a scale for `group` inputs (None: a row); 0 is the zero, or each group has one."""
    name = f"w8 in groups of {group}" if group else "w8 by channel"
    return PackedForm(name, "int8", scale, group, zero="zeros" if zeros else 0)


def w8a8(scale: Scale = "float32") -> PackedForm:
    """Eight bits with a scale a row, times activations rounded to eight bits with a scale a token."""
    return replace(w8(None, scale=scale), name="w8a8", integer_inputs=True)


def fp8(block: int | None, *, scale: Scale = "float32") -> PackedForm:
    """float8_e4m3fn with a scale for `block` inputs of a row, or for the whole row."""
    return PackedForm(f"fp8 in blocks of {block}" if block else "fp8 by channel", "fp8", scale, block)


Q4_0 = PackedForm("Q4_0", "nibbles", "float16", 32, zero=8)
Q4_1 = PackedForm("Q4_1", "nibbles", "float16", 32, zero="mins")
Q5_0 = PackedForm("Q5_0", "nibbles", "float16", 32, high=1, zero=16)
Q5_1 = PackedForm("Q5_1", "nibbles", "float16", 32, high=1, zero="mins")
Q8_0 = PackedForm("Q8_0", "int8", "float16", 32)
Q4_K = PackedForm("Q4_K", "nibbles", "six_bits", 32, zero="mins")
Q5_K = PackedForm("Q5_K", "nibbles", "six_bits", 32, high=1, zero="mins")
Q6_K = PackedForm("Q6_K", "nibbles", "q6_k", 16, high=2, zero=32)
IQ4_NL = PackedForm("IQ4_NL", "nibbles", "float16", 32, table=_IQ4_NL)
MXFP4 = PackedForm("MXFP4", "nibbles", "e8m0", 32, table=_TWICE_FP4)
EXACT_MXFP4 = replace(MXFP4, exact=True)  # the experts of gpt-oss, with the tokens of unpacked ones

# GGUF's packed types by their names in files.
GGUF_FORMS = {form.name: form for form in (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL, MXFP4)}
