"""LoRA adapters in worker processes: as in one process, and a worker that was killed gets them again."""

import os
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.config import Deadlines
from orca_jax.request.request import Row
from orca_jax.scheduling.engine_protocol import Engine, Iteration
from tests.whole.adapters.golden_adapters import load_golden_adapters
from tests.whole.adapters.test_adapters import CLOSE
from tests.whole.workers.worker_harness import SOON, OrcaWorker

STARTED = re.compile(r"stage (\d): its process \(pid (\d+)\) was started")
# Few programs, because worker processes compile all of them first.
SIZES: dict[str, Any] = {
    "max_batch_size": 4,
    "n_slots": 512,
    "max_batch_tokens": 32,
    "max_loras": 2,  # fewer than there are, so that some requests wait for their adapter
}
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
GOLDEN = load_golden_adapters("llama-grouped")
MIXED = [(name or None, each) for name, every in GOLDEN.expected.items() for each in every]


def check(llm: LLM) -> None:
    """All prompts with all adapters, of which two are there at a time, have PEFT's results."""
    results = llm.generate([each.prompt for _, each in MIXED], PARAMS, adapter=[name for name, _ in MIXED])
    for (name, each), result in zip(MIXED, results, strict=True):
        assert result.token_ids[: len(each.outputs)] == each.outputs, name
        assert result.prompt_logprobs is not None
        scores = [token.logprob for token in result.prompt_logprobs]
        np.testing.assert_allclose(scores, each.scores, atol=CLOSE, err_msg=str(name))


class Killer:
    """Kills a stage's worker process when a batch's request has so many output tokens."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.killed: list[int] = []
        self.to_kill: dict[int, int] = {}  # output tokens, to the stage

    def hear(self, event: str) -> None:
        """Note the process ids in an engine's events."""
        if started := STARTED.match(event):
            self.pids[int(started[1])] = int(started[2])

    def watch(self, engine: Engine) -> None:
        issue = engine.issue

        def deadly(rows: Sequence[Row]) -> Iteration:
            iteration = issue(rows)
            for req, _ in rows:
                stage = self.to_kill.pop(len(req.output_ids), None) if req.adapter is not None else None
                if stage is not None:
                    self.killed.append(stage)
                    os.kill(self.pids[stage], signal.SIGKILL)
            return iteration

        engine.issue = deadly


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param({}, id="default", marks=pytest.mark.matrix),
        # Admitted requests keep their place over a loss.
        pytest.param({"policy": "orca", "max_batch_tokens": 128}, id="orca", marks=pytest.mark.long),
        pytest.param({"tensor_parallel": 2}, id="two devices", marks=pytest.mark.long),
    ],
)
def test_killed_workers_get_the_adapters_again(policy: Mapping[str, Any]) -> None:
    """One stage dies while prompts with adapters are in flight, the other when outputs have begun."""
    killer = Killer()
    with LLM(
        GOLDEN.model,
        adapters=GOLDEN.directories,
        **{**SIZES, **policy},
        pipeline_parallel=2,
        worker_processes=True,
        deadlines=Deadlines(ready_seconds=SOON, iteration_seconds=SOON / 4, worker_seconds=SOON / 4),
        on_event=killer.hear,
    ) as llm:
        service = llm.service
        killer.watch(service.scheduler.engine)
        check(llm)
        assert service.recovery.losses == 0
        llm.load_adapter("new", GOLDEN.directories["all"])
        killer.to_kill = {0: 1, 3: 2}
        check(llm)
        assert killer.killed == [1, 2]
        assert (service.recovery.losses, service.recovery.n_blamed) == (2, 0)
        new = next(each for name, each in MIXED if name == "all" and each.outputs)
        (result,) = llm.generate([new.prompt], PARAMS, adapter="new")
        assert result.token_ids[: len(new.outputs)] == new.outputs


@pytest.mark.long
@pytest.mark.timeout(400)
def test_workers_of_another_machine() -> None:
    """Such workers share no directory with the server but the model's: an adapter comes over the network."""
    secret = "a secret that is long enough"
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                OrcaWorker(
                    GOLDEN.model,
                    ("--stage", stage, "--of", "2", "--dtype", "float32"),
                    variables={"ORCA_CONTROL_SECRET": secret},
                )
            )
            for stage in ("1", "2")
        ]
        addresses = [worker.listens().address for worker in workers]
        sizes = SIZES | {"workers": addresses, "control_secret": secret}
        check(stack.enter_context(LLM(GOLDEN.model, adapters=GOLDEN.directories, **sizes)))
