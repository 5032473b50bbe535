"""Make tests/data/golden/fp8.npz: a matrix in FP8 with a scale for each block, as transformers unpacks it.

`values` [256, 384] are the bytes, `scales` [2, 3]
float32, and `unpacked` float32 the elements of the flat matrix at `places`.
"""

# pyright: reportMissingImports=false

from collections.abc import Sequence

import numpy as np
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from scripts.golden.with_torch import GOLDEN

PATH = GOLDEN / "fp8.npz"


def make_files(only: Sequence[str]) -> None:
    """Write the file."""
    rng = np.random.default_rng(20221)
    values = ((7 * np.arange(256)[:, None] + 13 * np.arange(384)) % 256).astype(np.uint8)  # a small file
    values[(values & 0x7F) == 0x7F] = 0  # not a number
    scales = np.exp(rng.standard_normal((2, 3)) - 8).astype(np.float32)
    matrix = torch.from_numpy(values).view(torch.float8_e4m3fn)
    unpacked = Fp8Dequantize(None)._dequantize_one(matrix, torch.from_numpy(scales))
    assert unpacked.dtype == torch.float32
    places = np.sort(rng.choice(values.size, 3000, replace=False)).astype(np.int32)
    np.savez_compressed(
        PATH, values=values, scales=scales, places=places, unpacked=unpacked.numpy().ravel()[places]
    )
    print(f"{PATH.stat().st_size} bytes")
