"""Whether this machine can run the C code of orca_jax/native, whose tests are otherwise skipped."""

from pathlib import Path

import numpy as np
import pytest

from orca_jax.native.compiler import NotBuilt
from orca_jax.native.products import linear_target


def has_native() -> bool:
    """Whether this machine can build and run it."""
    try:
        return bool(linear_target(np.float32, np.float32))
    except NotBuilt:
        return False


def other_lanes() -> int:
    """The number of lanes that this processor does not choose: 8 with AVX-512, else 16."""
    return 8 if "avx512f" in _flags() else 16


def multiplies_bfloat16() -> bool:
    """Whether FP8 codes are multiplied as bfloat16 (packed_pairs.h)."""
    return {"avx512_bf16", "avx512vbmi"} <= _flags()


def has_tiles() -> bool:
    """Whether bfloat16 is multiplied in tiles (tile_panel.h)."""
    return {"avx512_bf16", "amx_bf16"} <= _flags()


def _flags() -> set[str]:
    return set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())


needs_native = pytest.mark.skipif(not has_native(), reason="no C compiler, or neither AVX-512 nor AVX2")
