"""A request that makes worker processes crash ends alone; kills from outside end no request."""

import os
import re
import signal
from collections.abc import Callable, Sequence
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


SIZES = {"max_batch_size": 8, "n_slots": 512, "max_batch_tokens": N_POSITIONS, "dtype": "float32"}


def right_tokens(model: Path) -> list[list[int]]:
    with LLM(model, **SIZES) as llm:
        return [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]


def in_processes(model: Path, pids: dict[int, int], restarts: int) -> LLM:
    """An engine of two processes, whose ids are kept in `pids` by stage."""

    def hear(event: str) -> None:
        started = STARTED.match(event)
        if started:
            pids[int(started[1])] = int(started[2])

    return LLM(
        model,
        **SIZES,
        worker_processes=True,
        pipeline_parallel=2,
        deadlines=Deadlines(ready_seconds=SOON),
        restarts=RestartBound(restarts=restarts),
        on_event=hear,
    )


def before_issue(llm: LLM, act: Callable[[Sequence[Row]], None]) -> None:
    """Let `act` see the rows of each iteration as soon as it is issued."""
    issue = llm.service.scheduler.engine.issue

    def watched(rows: Sequence[Row]) -> Iteration:
        iteration = issue(rows)
        act(rows)
        return iteration

    llm.service.scheduler.engine.issue = watched


@pytest.mark.long
@pytest.mark.parametrize(("stage", "at_token"), [(1, 0), (2, 5)])
def test_a_request_that_workers_die_of_ends_alone(tmp_path: Path, stage: int, at_token: int) -> None:
    model = write_model(tmp_path)
    right = right_tokens(model)
    pids: dict[int, int] = {}
    with in_processes(model, pids, restarts=1) as llm:
        service = llm.service

        def crash(rows: Sequence[Row]) -> None:
            if any(req.request_id == "poison" and len(req.output_ids) >= at_token for req, _ in rows):
                os.kill(pids[stage], signal.SIGSEGV)

        before_issue(llm, crash)
        healthy = [service.submit(prompt, PARAMS) for prompt in PROMPTS[:2]]
        poison = service.submit([9, 9], PARAMS, request_id="poison")
        healthy += [service.submit(prompt, PARAMS) for prompt in PROMPTS[2:]]
        with pytest.raises(OutputFailed, match="while it ran alone, so it is not retried"):
            poison.result(SOON)
        assert [generation.result(SOON).token_ids for generation in healthy] == right
        assert (service.recovery.losses, service.recovery.n_blamed) == (2, 1)
        assert service.failure is None
        assert [result.token_ids for result in llm.generate(PROMPTS, PARAMS)] == right


@pytest.mark.long
def test_a_request_that_runs_alone_while_workers_are_killed_from_outside_is_not_blamed(
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path)
    right = right_tokens(model)
    pids: dict[int, int] = {}
    signals = {2: signal.SIGKILL, 4: signal.SIGTERM, 6: signal.SIGKILL, 8: signal.SIGHUP}
    with in_processes(model, pids, restarts=len(signals)) as llm:

        def kill(rows: Sequence[Row]) -> None:
            ((req, _),) = rows
            number = signals.pop(len(req.output_ids), None)
            if number is not None:
                os.kill(pids[1 + len(signals) % 2], number)

        before_issue(llm, kill)
        assert llm.generate(PROMPTS[:1], PARAMS)[0].token_ids == right[0]
        assert (llm.service.recovery.losses, llm.service.recovery.n_blamed) == (4, 0)
