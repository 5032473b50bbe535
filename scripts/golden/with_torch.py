"""Settings for golden files made by transformers: the same numbers in every run."""

# pyright: reportMissingImports=false

import platform
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
import transformers

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = REPOSITORY / "tests" / "data" / "golden"
SEED = 20221
MARGIN = 1e-4  # rounding alone can swap two logits closer than this

torch.manual_seed(SEED)
torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)
transformers.logging.disable_progress_bar()


def versions() -> dict[str, Any]:
    """Versions of the packages that make the files."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
        "numpy": np.__version__,
        "seed": SEED,
    }
