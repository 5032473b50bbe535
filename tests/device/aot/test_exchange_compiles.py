"""Token exchange compiled for H200s that need not be present; skipped without the CUDA plugin."""

from typing import Any

from tests.device.aot.without_gpu import needs_plugin, run_without_gpu


@needs_plugin
def test_tokens_are_exchanged_by_the_ragged_collective() -> None:
    found: dict[str, Any] = run_without_gpu("-m", "tests.device.aot.exchange_programs")
    # Outside of the layer: the embedding's sum, and the logits side by side.
    layer = {"reduce-scatter": 1, "all-gather": 2, "ragged-all-to-all": 2}
    assert found["exchange"] == {**layer, "all-reduce": 1, "all-gather": 2 + 1}
    # Over NVLink the cost model never exchanges: two sums.
    assert found["auto"] == {"all-reduce": 2 + 1, "all-gather": 1}
