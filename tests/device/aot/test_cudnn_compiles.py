"""cuDNN's attention compiled by XLA for GPUs that need not be present; skipped without the CUDA plugin.

XLA does not ask cuDNN for a GPU that is only described: these programs show what cuDNN will be given, not
that it accepts it. They compile in a separate process, so the result does not depend on this machine's GPU.
"""

from typing import Any

import pytest

from tests.device.aot.cudnn_programs import KINDS, LAYOUTS, N_LAYERS
from tests.device.aot.without_gpu import needs_plugin, run_without_gpu

pytestmark = needs_plugin


@pytest.fixture(scope="module")
def programs() -> dict[str, list[dict[str, Any]]]:
    return run_without_gpu("-m", "tests.device.aot.cudnn_programs")


@pytest.mark.parametrize("kind", KINDS)
def test_cudnn_reads_the_caches_in_place(programs: dict[str, list[dict[str, Any]]], kind: str) -> None:
    for program, layout in zip(programs[kind], LAYOUTS, strict=True):
        # For rows of one token, and for tiles where the bucket has more than one.
        n_calls = N_LAYERS * (1 if layout.n_tokens == 1 else 2)
        assert program["calls"] == program["own caches"] == n_calls
        assert program["copies"] == program["loops"] == 0
        assert program["default"] == ("kernel" if kind == "h200" else "cudnn")
