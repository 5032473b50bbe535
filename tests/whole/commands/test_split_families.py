"""Each family over stages and devices, in one process and in worker processes: transformers' tokens."""

from typing import Any

import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.errors import ConfigError
from orca_jax.families.hf_config import read_config, read_hf_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.planning.stage_layers import tensor_degrees
from tests.device.model.golden import NAMES, load_golden


def devices(model: ModelConfig) -> int:
    """The smallest number above 1 over which heads and feed-forward can be split, or 1."""
    for n in range(2, 8):
        try:
            split = model.for_devices(n)
        except ConfigError:
            continue
        if n in tensor_degrees(split, n):
            return n
    return 1


def one_of_each_family() -> dict[str, tuple[str, int]]:
    """For each family its first shape that can be split, and the number of devices."""
    chosen: dict[str, tuple[str, int]] = {}
    for name in NAMES:
        directory = load_golden(name).directory
        if read_config(directory).input_size is not None:
            continue  # stages cannot share inputs of layers
        family, n = read_hf_config(directory).family.model_type, devices(read_config(directory))
        if family not in chosen or (chosen[family][1] == 1 < n):
            chosen[family] = name, n
    return chosen


CHOSEN = one_of_each_family()
QUICK = ("llama",)


def check(name: str, **options: Any) -> None:
    golden = load_golden(name)
    n_tokens = max(64, read_config(golden.directory).n_positions)
    # Deterministic: programs of two sizes alone have to be compiled.
    sizes = {"max_batch_size": 8, "max_batch_tokens": n_tokens, "deterministic": True}
    with LLM(golden.directory, dtype="float32", pipeline_parallel=2, **sizes, **options) as llm:
        params = [
            SamplingParams(max_tokens=len(tokens), temperature=0, ignore_eos=True)
            for tokens in golden.outputs
        ]
        results = llm.generate([list(prompt) for prompt in golden.prompts], params)
    for i, result in enumerate(results):
        sure = golden.sure(i)
        assert tuple(result.token_ids[: len(sure)]) == sure, (name, i)


def test_every_family_is_split() -> None:
    assert not {family for family, (_, n) in CHOSEN.items() if n == 1}


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[] if one in QUICK else [pytest.mark.long]) for one in CHOSEN]
)
def test_in_one_process(family: str) -> None:
    name, n = CHOSEN[family]
    check(name, tensor_parallel=n)


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma3_text", "qwen2", "falcon", "qwen2_moe"])
def test_in_worker_processes(family: str) -> None:
    name, n = CHOSEN[family]
    check(name, tensor_parallel=n, worker_processes=True)


@pytest.mark.long
@pytest.mark.parametrize("in_processes", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_that_exchange_tokens(family: str, in_processes: bool) -> None:
    name, n = CHOSEN[family]
    check(name, tensor_parallel=n, worker_processes=in_processes, expert_exchange="exchange")
