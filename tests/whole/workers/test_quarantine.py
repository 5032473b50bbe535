"""A request that a worker process dies of each time it runs ends alone, and the others get their tokens."""

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.config import Deadlines, RestartBound
from orca_jax.errors import OutputFailed
from orca_jax.request.request import Row
from orca_jax.scheduling.engine_protocol import Iteration
from tests.whole.workers.worker_harness import N_POSITIONS, SOON, write_model

PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [[5 + i, 60, 70 + i] for i in range(4)]
STARTED = re.compile(r"stage (\d): its process \(pid (\d+)\) was started")


@pytest.mark.long
@pytest.mark.parametrize(("stage", "at_token"), [(1, 0), (2, 5)])
def test_a_request_that_workers_die_of_ends_alone(tmp_path: Path, stage: int, at_token: int) -> None:
    model = write_model(tmp_path)
    sizes = {"max_batch_size": 8, "n_slots": 512, "max_batch_tokens": N_POSITIONS, "dtype": "float32"}
    with LLM(model, **sizes) as llm:
        right = [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]
    pids: dict[int, int] = {}

    def hear(event: str) -> None:
        started = STARTED.match(event)
        if started:
            pids[int(started[1])] = int(started[2])

    with LLM(
        model,
        **sizes,
        worker_processes=True,
        pipeline_parallel=2,
        deadlines=Deadlines(ready_seconds=SOON),
        restarts=RestartBound(restarts=1),
        on_event=hear,
    ) as llm:
        service = llm.service
        issue = service.scheduler.engine.issue

        def deadly(rows: Sequence[Row]) -> Iteration:
            iteration = issue(rows)
            if any(req.request_id == "poison" and len(req.output_ids) >= at_token for req, _ in rows):
                os.kill(pids[stage], signal.SIGSEGV)
            return iteration

        service.scheduler.engine.issue = deadly
        healthy = [service.submit(prompt, PARAMS) for prompt in PROMPTS[:2]]
        poison = service.submit([9, 9], PARAMS, request_id="poison")
        healthy += [service.submit(prompt, PARAMS) for prompt in PROMPTS[2:]]
        with pytest.raises(OutputFailed, match="while it ran alone, so it is not retried"):
            poison.result(SOON)
        assert [generation.result(SOON).token_ids for generation in healthy] == right
        assert (service.recovery.losses, service.recovery.n_blamed) == (2, 1)
        assert service.failure is None
        assert [result.token_ids for result in llm.generate(PROMPTS, PARAMS)] == right
