"""LoRA adapters whose numbers follow from their tensors' names, so that no file has to hold them.

A golden file has what PEFT saved but the numbers: adapter_config.json, and each tensor's name and shape.
scripts/golden/adapters.py gives PEFT the same numbers.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def drawn(name: str, shape: Sequence[int], seed: int) -> np.ndarray:
    """A tensor [*shape] float32, the same in every version of NumPy."""
    bits = np.random.Philox(key=[zlib.crc32(name.encode()), seed]).random_raw(int(np.prod(shape)))
    uniform = (np.asarray(bits) >> np.uint64(40)).astype(np.float64) / 2**23 - 1
    return (0.8 * uniform.reshape(shape) / shape[-1] ** 0.5).astype(np.float32)


def packed(config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> np.ndarray:
    """A config and shapes as an array of bytes for a golden file."""
    text = json.dumps([dict(config), {name: [*shape] for name, shape in shapes.items()}], sort_keys=True)
    return np.frombuffer(text.encode(), np.uint8)


def unpacked(stored: np.ndarray) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """The config and the shapes of `packed`."""
    config, shapes = json.loads(stored.tobytes())
    return config, shapes
