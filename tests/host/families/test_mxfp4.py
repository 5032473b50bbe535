"""MXFP4 by hand."""

import numpy as np
import pytest

from orca_jax.families.mixtures.mxfp4 import FP4, GREATEST_SCALE, unpack


def numbers(blocks: list[list[int]], scales: list[list[int]]) -> np.ndarray:
    """bfloat16 bits as float32, of which they are the upper half."""
    bits = unpack(np.array(blocks, np.uint8), np.array(scales, np.uint8))
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_literal_blocks_have_their_values() -> None:
    block = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, *[0] * 8]
    ones = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6, *[0] * 16]
    found = numbers([block, block], [[127], [130]])
    assert found.tolist() == [ones, [8 * each for each in ones]]
    assert np.signbit(found[0, 8]) and not np.signbit(found[0, 0])


def test_each_block_has_a_scale() -> None:
    found = numbers([[0x22] * 16 + [0x0A] * 16], [[120, 129]])
    assert found.shape == (1, 64)
    assert (found[0, :32] == 2.0**-7).all()
    assert found[0, 32:].tolist() == [-4, 0] * 16


@pytest.mark.parametrize("scale", [0, 1, 2, 100, GREATEST_SCALE])
def test_no_number_is_rounded(scale: int) -> None:
    """The smallest numbers are subnormal."""
    found = numbers([[i << 4 | i for i in range(8)] * 2], [[scale]])
    expected = np.ldexp(np.repeat(FP4, 2), scale - 127)
    assert np.isfinite(found).all()
    assert found[0, :16].astype(np.float64).tolist() == expected.tolist()


def test_many_rows_are_unpacked_in_steps() -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3000, 16 * 13), np.uint8)  # more than one step
    scales = rng.integers(110, 130, (3000, 13), np.uint8)
    found = numbers(blocks.tolist(), scales.tolist())
    low, high = blocks & 7, blocks >> 4 & 7
    fp4 = np.array(FP4)
    expected = np.stack(
        [np.where(blocks & 8, -fp4[low], fp4[low]), np.where(blocks & 128, -fp4[high], fp4[high])], 2
    )
    factor = np.ldexp(1.0, scales.astype(int) - 127).repeat(32, axis=1)
    assert np.array_equal(found, expected.reshape(3000, -1) * factor)
