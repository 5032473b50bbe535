"""MXFP4 (Open Compute Project, 2023): numbers of four bits, 32 of which share an exponent of one byte.

A number, FP4, has a sign, two bits of exponent and one of mantissa. A byte holds two numbers, the first in
its lower half. The shared exponent counts from -127. Experts that stay packed are in the form
families.packed_form.EXACT_MXFP4.
"""

from functools import cache

import numpy as np
import numpy.typing as npt

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # then their negatives
BLOCK = 32  # numbers with one scale
BIAS = 127
GREATEST_SCALE = 252  # with a greater scale, 6 times it is no float32
_STEP_BYTES = 1 << 19  # small, so that intermediate arrays stay in a core's cache


def unpack(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """Unpack `blocks` [rows, 16 n] with `scales` [rows, n] exactly, to the bits of bfloat16 [rows, 32 n]."""
    n_rows, n_bytes = blocks.shape
    out = np.empty((n_rows, n_bytes), np.uint32)
    step = max(1, _STEP_BYTES // max(1, n_bytes))
    pairs = _pairs()
    for row in range(0, n_rows, step):
        scale = scales[row : row + step].repeat(BLOCK // 2, axis=1).astype(np.uint16)
        pairs.take(scale << 8 | blocks[row : row + step], out=out[row : row + step])
    return out.view(np.uint16)


@cache
def _pairs() -> npt.NDArray[np.uint32]:
    """Tabulate the two numbers of each scale and byte, [2 ** 16]."""
    fp4 = np.array([*FP4, *(-each for each in FP4)])
    byte = np.arange(256)
    both = np.stack([fp4[byte & 15], fp4[byte >> 4]], axis=1)  # [256, 2]
    scale = np.ldexp(1.0, np.arange(256) - BIAS)[:, None, None]
    with np.errstate(over="ignore"):
        numbers = (both * scale).astype("<f4")
    bits = (numbers.view("<u4") >> 16).astype("<u2")  # the bits that bfloat16 omits are zero
    return bits.view("<u4").reshape(-1)
