"""Make tests/data/golden/gguf_types.npz: blocks of each type of GGUF, and their numbers by the package gguf.

For each type KIND: `KIND` is uint8 [n, bytes], blocks of random bytes whose numbers are finite, and `KIND.`
their numbers, float32 [n, numbers]. The environment needs `gguf`.
"""

# pyright: reportMissingImports=false

from collections.abc import Sequence

import gguf
import numpy as np

from tests.gguf_bytes import BLOCK_TYPES
from tests.places import ROOT

PATH = ROOT / "tests" / "data" / "golden" / "gguf_types.npz"
NUMBERS = 4096


def make_files(only: Sequence[str]) -> None:
    """Write the file."""
    rng = np.random.default_rng(4 * 47)
    arrays: dict[str, np.ndarray] = {}
    for name in BLOCK_TYPES:
        kind = gguf.GGMLQuantizationType[name]
        n_numbers, n_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (2 * NUMBERS // n_numbers, n_bytes), np.uint8)
        with np.errstate(all="ignore"):
            numbers = gguf.quants.dequantize(blocks, kind)
        finite = np.flatnonzero(np.isfinite(numbers).all(axis=1))[: NUMBERS // n_numbers]
        assert len(finite) == NUMBERS // n_numbers
        arrays[name], arrays[f"{name}."] = blocks[finite], numbers[finite]
    np.savez_compressed(PATH, **arrays)
    print(f"{PATH.stat().st_size} bytes")
