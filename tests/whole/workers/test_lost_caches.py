"""If a worker process is lost, an encoder's input and recurrent states are computed again.

Prompts that come again are found in the memory of each process, where evicted blocks are, and states.
"""

import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.config import Deadlines
from orca_jax.request.request import Row
from orca_jax.scheduling.engine_protocol import Iteration
from tests.device.model.golden import load_golden
from tests.device.model.golden_encoders import load_golden_encoder
from tests.whole.workers.worker_harness import SOON

SIZES: dict[str, Any] = {"max_batch_size": 8, "max_batch_tokens": 64, "n_slots": 4096, "snapshot_blocks": 1}
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
STARTED = re.compile(r"stage (\d): its process \(pid (\d+)\) was started")


def of_an_encoder() -> tuple[Path, list[list[int]]]:
    golden = load_golden_encoder("t5-gated")
    return golden.directory, [list(ids) for ids in golden.inputs]


def of_a_hybrid() -> tuple[Path, list[list[int]]]:
    golden = load_golden("bamba-grouped")
    return golden.directory, [list(prompt) for prompt in golden.prompts if len(prompt) < 50]


def of_a_decoder() -> tuple[Path, list[list[int]]]:
    golden = load_golden("llama-grouped")
    return golden.directory, [list(prompt) for prompt in golden.prompts if 15 < len(prompt) < 70]


@pytest.mark.long
@pytest.mark.parametrize("of_model", [of_an_encoder, of_a_hybrid, of_a_decoder])
def test_requests_lose_nothing_with_a_worker(
    of_model: Callable[[], tuple[Path, list[list[int]]]],
) -> None:
    """One stage dies while prompts are in flight, the other when outputs have begun."""
    directory, prompts = of_model()
    has_tier = of_model is not of_an_encoder
    sizes: dict[str, Any] = SIZES | (
        {"n_slots": 192, "block_size": 4, "kv_host_bytes": 1 << 20} if has_tier else {}
    )
    with LLM(directory, **SIZES) as llm:
        right = [result.token_ids for result in llm.generate(prompts, PARAMS)]
    pids: dict[int, int] = {}
    to_kill = [(1, 0), (2, 5)]  # the stage, and how many tokens a request has by then
    killed = list[tuple[int, int]]()

    def hear(event: str) -> None:
        started = STARTED.match(event)
        if started:
            pids[int(started[1])] = int(started[2])

    with LLM(
        directory,
        **sizes,
        pipeline_parallel=2,
        worker_processes=True,
        deadlines=Deadlines(ready_seconds=SOON, iteration_seconds=SOON / 4, worker_seconds=SOON / 4),
        on_event=hear,
    ) as llm:
        service = llm.service
        issue = service.scheduler.engine.issue

        def deadly(rows: Sequence[Row]) -> Iteration:
            iteration = issue(rows)
            if not killed and any(len(req.output_ids) == n_tokens for req, _ in rows):
                killed.append((stage, n_tokens))
                os.kill(pids[stage], signal.SIGKILL)
            return iteration

        service.scheduler.engine.issue = deadly
        for i, (stage, n_tokens) in enumerate(to_kill, start=1):
            killed.clear()
            results = llm.generate(prompts, PARAMS)
            assert [result.token_ids for result in results] == right
            assert killed == [(stage, n_tokens)]
            assert (service.recovery.losses, service.recovery.n_blamed) == (i, 0)
        if has_tier:  # which is filled and read by the processes that live now
            tiers = service.scheduler.kv.tiers
            assert len(tiers) == 1 + (of_model is of_a_hybrid), "of blocks, and of states"
            before = [tier.n_read for tier in tiers]
            results = llm.generate(prompts, PARAMS)
            assert [result.token_ids for result in results] == right
            assert any(result.n_cached for result in results)
            assert all(tier.n_read > n for tier, n in zip(tiers, before, strict=True))
