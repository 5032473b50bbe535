"""Adapters of a base whose weights are packed: log-probabilities are those with the same numbers, dense."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.adapters import write_adapter
from orca_jax import LLM
from tests.device.checkpoint.test_quantized_models import written
from tests.quantized_checkpoints import FORMATS

SIZES: dict[str, Any] = {"max_batch_size": 4, "max_batch_tokens": 32, "n_slots": 256, "dtype": "float32"}
PROMPTS = [[*range(1, 12)], [7, 8, 9, 5, 3]]


def scores(model: Path, adapters: dict[str, Path], chosen: Sequence[str | None]) -> list[np.ndarray]:
    with LLM(model, adapters=adapters, **SIZES) as llm:
        return [np.concatenate(llm.score(PROMPTS, adapter=name)) for name in chosen]


@pytest.mark.matrix(but=["fp8-block"])
@pytest.mark.parametrize("name", ["fp8-block", "w4a16", "awq", "gptq-8"])
def test_adapters_of_a_packed_base(tmp_path: Path, name: str) -> None:
    """CPUs round the inputs of their products, which changes less than the adapter does."""
    packed, dense = written(tmp_path, FORMATS[name])
    write_adapter(tmp_path / "adapter", dense, 7, 3)
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 140}))
    adapters = {"one": tmp_path / "adapter"}
    (plain, adapted), (without, exact) = (scores(one, adapters, [None, "one"]) for one in (packed, dense))
    rounding, change = np.abs(plain - without).max(), np.abs(exact - without).max()
    assert change > max(0.5, 10 * rounding)
    np.testing.assert_allclose(adapted, exact, atol=change / 10)
