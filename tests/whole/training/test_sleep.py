"""LLM.sleep, wake_up, pause and resume: memory given back, and the same tokens afterwards."""

import gc
import threading
from pathlib import Path
from typing import Any

import jax
import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.errors import ConfigError, EngineAsleep, ServiceClosed
from tests.device.model.golden import load_golden
from tests.whole.training.weights import GREEDY, LONG, PROMPTS, SIZES, arrays, reference_tokens, tokens


def live() -> int:
    """Bytes of all arrays on devices."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.fixture(scope="module")
def llm(old: Path):
    with LLM(old, **SIZES) as llm:
        assert tokens(llm) == reference_tokens(old)
        yield llm


def test_sleep_gives_memory_back_and_waking_serves_the_same_tokens(llm: LLM, old: Path):
    expected = reference_tokens(old)
    awake = live()
    sizes = arrays(old)
    weights = sum(array.nbytes for array in sizes.values())
    llm.sleep()
    caches_only = awake - live()
    assert caches_only >= 0.95 * (2 * 2 * 16 * 4 * SIZES["n_slots"])  # two layers, keys and values, float32
    llm.sleep(2)
    given_back = awake - live()
    assert given_back >= caches_only + 0.95 * weights
    llm.sleep(1)  # it sleeps more deeply already
    assert awake - live() == given_back
    with pytest.raises(EngineAsleep, match="must be woken first"):
        llm.generate(PROMPTS, GREEDY)
    compiled = llm.compiles
    llm.wake_up()
    assert llm.compiles == compiled
    assert live() == awake
    assert tokens(llm) == expected
    assert llm.weights_version == 0
    llm.wake_up()  # nothing happens
    assert tokens(llm) == expected


def test_new_weights_while_asleep(llm: LLM, old: Path, new: Path):
    awake = live()
    for level in (1, 2):
        llm.sleep(level)
        llm.update_weights(arrays(new))
        assert live() < awake  # the caches are not back
        llm.wake_up()
        assert live() == awake
        assert tokens(llm) == reference_tokens(new)
        llm.sleep(2)
        llm.update_weights(
            {
                "final_norm.scale": arrays(old)["final_norm.scale"],
            }
            | {name: value for name, value in arrays(old).items() if name != "final_norm.scale"}
        )
        llm.wake_up()
        assert tokens(llm) == reference_tokens(old)


def test_requests_that_wait_run_after_the_pause(llm: LLM, old: Path):
    llm.pause()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(tokens(llm)), daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and not results
    llm.pause()  # nothing changes
    llm.resume()
    thread.join(60)
    assert results == reference_tokens(old)
    llm.resume()


def test_a_paused_request_goes_on_where_it_was(llm: LLM, old: Path):
    with llm.stream([5, 6], LONG) as running:
        next(running)
        llm.pause()
        llm.resume()
        llm.pause()
        llm.sleep(2, running="continue")
        llm.wake_up()
        llm.resume()
        assert running.result(60).token_ids == reference_tokens(old, [[5, 6]], 40)[0]
        assert set(running.result().token_versions) == {llm.weights_version}


@pytest.mark.parametrize("level", [0, 3, True, "2"])
def test_other_levels_are_refused(llm: LLM, level: Any):
    with pytest.raises(ConfigError, match="level is"):
        llm.sleep(level)


def test_closing_a_paused_engine_ends_its_requests(old: Path):
    llm = LLM(old, **SIZES)
    llm.pause()
    running = llm.stream([5, 6], LONG)
    llm.close()
    assert running.finish_reason == "cancelled"
    for call in (llm.pause, llm.resume, llm.sleep, llm.wake_up, lambda: llm.update_weights({})):
        with pytest.raises(ServiceClosed):
            call()


def test_a_hybrids_states_are_given_back_and_come_back():
    """Bamba's matrices and convolutions, for eight rows: two batches of four."""
    golden = load_golden("bamba-grouped")
    states = 8 * 4 * (8 * 6 * 8 + 3 * (64 + 2 * 2 * 6))  # of the one recurrent layer, float32
    numbers = [i for i, prompt in enumerate(golden.prompts) if len(prompt) + 16 <= 64][:6]
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    with LLM(golden.directory, dtype="float32", **SIZES) as llm:
        for _ in range(2):
            results = llm.generate([golden.prompts[i] for i in numbers], params)
            for i, result in zip(numbers, results, strict=True):
                sure = golden.sure(i)
                assert tuple(result.token_ids[: len(sure)]) == sure
            awake = live()
            llm.sleep()
            assert awake - live() >= 0.95 * (states + 2 * 2 * 8 * 4 * SIZES["n_slots"])
            llm.wake_up()
            assert live() == awake
