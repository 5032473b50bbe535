"""An adapter's prompts travel, and stay on disk, by what the adapter holds, not by its name."""

from pathlib import Path
from typing import Any

from orca_jax import LLM, SamplingParams
from orca_jax.request.kv_transfer import KVTransferParams
from orca_jax.request.scheduling_params import SchedulingParams
from tests.whole.adapters.golden_adapters import Expected, load_golden_adapters

GOLDEN = load_golden_adapters("llama-grouped")
NAME, OTHER, *_ = GOLDEN.directories
SIZES: dict[str, Any] = {"max_batch_size": 2, "max_batch_tokens": 64, "n_slots": 256, "block_size": 4}
SIZES |= {"kv_host_bytes": 1 << 20, "compile_ahead": False, "max_lora_rank": 64}


def engine(of: str, **other: Any) -> LLM:
    """An engine whose adapter NAME holds what the golden adapter `of` holds."""
    return LLM(GOLDEN.model, adapters={NAME: GOLDEN.directories[of]}, **SIZES, **other)


def check(llm: LLM, of: str, each: Expected, **how: Any) -> int:
    """Check a prompt's greedy tokens, and return how many of its own the engine found."""
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    scheduling = SchedulingParams(adapter=NAME, **how)
    with llm.service.submit(each.prompt, params, scheduling=scheduling) as generation:
        result = generation.result(30)
    expected = GOLDEN.expected[of][GOLDEN.expected[NAME].index(each)].outputs
    assert result.token_ids[: len(expected)] == expected
    return result.n_cached


def lease(llm: LLM, each: Expected) -> KVTransferParams:
    scheduling = SchedulingParams(adapter=NAME, kv_transfer=KVTransferParams(do_remote_decode=True))
    params = SamplingParams(max_tokens=1, temperature=0)
    with llm.service.submit(each.prompt, params, scheduling=scheduling) as generation:
        generation.result(30)
    assert generation.kv_lease is not None
    return generation.kv_lease


LONG = max(GOLDEN.expected[NAME], key=lambda each: len(each.prompt))
FOUND = (len(LONG.prompt) - 1) // 4 * 4


def test_another_engine_goes_on_with_the_same_adapter_alone() -> None:
    with engine(NAME, role="prefill") as prefill:
        for of, n_found in ((NAME, FOUND), (OTHER, 0)):
            with engine(of, role="decode", kv_transfer_seconds=60.0) as decode:
                assert check(decode, of, LONG, kv_transfer=lease(prefill, LONG)) == n_found


def test_a_restarted_engine_finds_the_prompts_of_the_same_adapter_alone(tmp_path: Path) -> None:
    for of, n_found in ((NAME, 0), (OTHER, 0), (NAME, FOUND)):
        with engine(of, kv_disk=tmp_path) as llm:
            assert check(llm, of, LONG) == n_found
