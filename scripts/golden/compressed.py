"""Make tests/data/golden/compressed.npz: matrices as the package compressed-tensors packs and unpacks them.

For each scheme NAME: `NAME` is the group of a quantization_config as the package writes it, in JSON;
`NAME.LEAF` the tensors of a module, FP8 as bytes; and `NAME.` the unpacked matrix, float32 [24, 128].
The environment needs `torch` and `compressed-tensors`.
"""

# pyright: reportMissingImports=false

import json
from collections.abc import Sequence

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from tests.places import ROOT

PATH = ROOT / "tests" / "data" / "golden" / "compressed.npz"
SHAPE = (24, 128)
SCHEMES = {
    "w4-group": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "w4-channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "w4-zeros": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False},
    ),
    "w8-group": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 128}),
    "w8-zeros": ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "int8-channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8-tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "int8-zeros": (
        "int-quantized",
        {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8-block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 64]},
    ),
}


def make_files(only: Sequence[str]) -> None:
    """Write the file."""
    rng = np.random.default_rng(20221)
    arrays: dict[str, np.ndarray] = {}
    for name, (stored_as, weights) in SCHEMES.items():
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), format=stored_as)
        args = scheme.weights
        assert args is not None
        n_rows, n_groups = _scales(weights)
        greatest = 448 if args.type == "float" else 1 << args.num_bits - 1
        scales = (0.1 * rng.uniform(0.5, 1, (n_rows, n_groups)) / greatest).astype(np.float32)
        module = {
            "weight": torch.from_numpy(rng.normal(0, 0.05, SHAPE).astype(np.float32)),
            "weight_scale": torch.from_numpy(scales[0] if args.strategy == "tensor" else scales),
        }
        if not args.symmetric:
            module["weight_zero_point"] = torch.from_numpy(rng.integers(-7, 8, scales.shape).astype(np.int8))
        compressor = BaseCompressor.get_value_from_registry(stored_as)
        compressed = compressor.compress(module, scheme)
        unpacked = compressor.decompress(dict(compressed), scheme)["weight"]
        assert unpacked.dtype == torch.float32
        arrays[name] = np.array(json.dumps(json.loads(scheme.model_dump_json())))
        arrays[f"{name}."] = unpacked.numpy()
        for leaf, tensor in compressed.items():
            is_fp8 = tensor.dtype == torch.float8_e4m3fn
            arrays[f"{name}.{leaf}"] = (tensor.view(torch.uint8) if is_fp8 else tensor).numpy()
    np.savez_compressed(PATH, **arrays)
    print(f"{PATH.stat().st_size} bytes")


def _scales(weights: dict[str, object]) -> tuple[int, int]:
    """Rows and groups of scales."""
    match weights:
        case {"strategy": "tensor"}:
            return 1, 1
        case {"group_size": int(size)}:
            return SHAPE[0], SHAPE[1] // size
        case {"block_structure": [int(rows), int(columns)]}:
            return -(-SHAPE[0] // rows), SHAPE[1] // columns
        case _:
            return SHAPE[0], 1
