"""Compiles a mixture for GPUs that need not be present, and prints each form's collectives in JSON.

JAX_PLATFORMS=cpu python -m tests.device.aot.exchange_programs
"""

import json
from dataclasses import replace

from bench.compiled.collectives import counts
from orca_jax.aot.compiled_stage import compile_stage
from orca_jax.aot.described_gpu import described_devices
from orca_jax.config import ExpertExchange, ParallelConfig
from orca_jax.families.presets import PRESETS
from orca_jax.sharding.partition import split_model

N_DEVICES, BUCKET = 8, 64
_WHOLE = PRESETS["qwen3-30b-a3b"]
MODEL = replace(_WHOLE, layers=_WHOLE.layers[:1]).for_devices(N_DEVICES)


def main() -> None:
    """Report on a forward pass of one layer, forced to exchange tokens and as the cost model chooses."""
    found: dict[str, dict[str, int]] = {}
    forms: list[ExpertExchange] = ["exchange", "auto"]
    for form in forms:
        parallel = ParallelConfig(tensor_parallel=N_DEVICES, expert_exchange=form)
        (part,) = split_model(MODEL, described_devices("h200", N_DEVICES), parallel)
        text = compile_stage(MODEL, part, BUCKET, max_bs=8, n_blocks=64).program.as_text()
        assert text is not None
        found[form] = counts(text)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
