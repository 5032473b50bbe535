"""The experts that tokens chose, reported by two worker processes for their layers, also after a kill."""

import os
import re
import signal
from typing import Any

import numpy as np
import pytest

from orca_jax import LLM, SamplingParams
from tests.places import DATA
from tests.whole.workers.worker_harness import SOON

MODEL = DATA / "golden" / "mixtral-window-tied"  # three layers of five experts, of which a token takes three
SIZES: dict[str, Any] = {
    "max_batch_size": 4,
    "max_batch_tokens": 16,
    "n_slots": 512,
    "dtype": "float32",
    "chunked_prefill": True,
}
ASK = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, return_routed_experts=True, n=2)
PROMPTS = [[5], list(range(1, 31)), [7, 8, 9], list(range(3, 20))]
STARTED = re.compile(r"its process \(pid (\d+)\) was started")


@pytest.mark.long
def test_two_processes_report_the_same_experts_as_one_even_after_a_kill() -> None:
    with LLM(MODEL, **SIZES) as llm:
        expected = llm.generate(PROMPTS, ASK)
    assert (
        len({result.routed_experts.tobytes() for result in expected if result.routed_experts is not None})
        == 4
    )
    events: list[str] = []

    def pids() -> list[int]:
        return [int(match[1]) for line in events if (match := STARTED.search(line))]

    with LLM(MODEL, worker_processes=True, pipeline_parallel=2, on_event=events.append, **SIZES) as llm:
        results = llm.generate(PROMPTS, ASK)
        running = [llm.stream(prompt, choice) for prompt in PROMPTS for choice in ASK.choices()]
        for stream in running:
            stream.next_piece(SOON)
        os.kill(pids()[0], signal.SIGKILL)
        again = [stream.result(SOON) for stream in running]
        assert len(pids()) == 3, "another was started for it"
    for found in (results, again):
        for one, wanted in zip(found, expected, strict=True):
            assert one.token_ids == wanted.token_ids
            ids, exact = one.routed_experts, wanted.routed_experts
            assert ids is not None and exact is not None
            assert ids.shape == (one.n_input + 24 - 1, 3, 3) and ids.dtype == np.uint8
            np.testing.assert_array_equal(np.sort(ids), np.sort(exact))
