"""Processes are killed at every tenth of an update: old or new weights, and the rollout resumes.

Each time the state at the moment of the death decides which weights there are afterwards.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import pytest
from flax import nnx

from examples.own_model import GatedModel
from orca_jax import LLM
from orca_jax.config import RestartBound
from orca_jax.control.frame import READY, Frame
from orca_jax.engine.remote_workers import RemoteWorkers
from orca_jax.errors import CheckpointError
from orca_jax.rollout import Group, Rollout
from orca_jax.service.follower import CheckpointFollower
from tests.whole.pauses import pause_after
from tests.whole.rollout.watched_update import (
    ADDRESS,
    BEGUN,
    HERE,
    PARAMS,
    SIZES,
    SOON,
    STAGES,
    TRAINER,
    Watcher,
    save,
    submit_all,
    weights,
)

# What kills a worker in the middle of its part of an update, while the other one has the new weights already:
# its step is still there; the step is gone, too; or it is the other worker that dies.
Death = Literal["its step stays", "its step is gone", "the other one"]
DEATHS: tuple[Death, ...] = ("its step stays", "its step is gone", "the other one")


@pytest.fixture
def watcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watcher]:
    monkeypatch.setenv(ADDRESS, str(tmp_path / "watcher"))
    watcher = Watcher(tmp_path / "watcher")
    yield watcher
    watcher.close()


class Expected:
    """The trainer's forward pass, and the tokens of a rollout that nothing disturbs, by the weights' seed."""

    def __init__(self) -> None:
        graph, _ = nnx.split(GatedModel(vocab_size=64))
        self._forward = jax.jit(lambda state, ids: jax.nn.log_softmax(nnx.merge(graph, state)(ids)[0]))
        self._weights = {seed: weights(seed) for seed in (0, 1, 2)}
        self.llm = LLM(GatedModel(vocab_size=64), **SIZES)
        self.tokens = {seed: self._undisturbed(seed) for seed in self._weights}  # by a group's key and a seed

    def use(self, seed: int) -> None:
        """Give `llm` these weights."""
        self.llm.update_weights(self._weights[seed])

    def _undisturbed(self, seed: int) -> dict[Any, list[int]]:
        self.use(seed)
        with Rollout(self.llm) as rollout:
            submit_all(rollout)
            return tokens(rollout.take(4))

    def check(self, groups: list[Group], seed_of: Mapping[int, int], *, first: int | None = None) -> None:
        """Each token is one of its version's weights, those of version `first` are as undisturbed ones."""
        for sample in (sample for group in groups for sample in group.samples):
            ids = np.zeros((1, 64), np.int32)
            whole = [*sample.prompt_ids, *sample.token_ids]
            ids[0, : len(whole)] = whole
            assert sample.logprobs is not None and len(sample.token_ids) == PARAMS.max_tokens
            for version in {*sample.versions.tolist()}:
                seed, these = seed_of[version], sample.versions == version
                exact = np.asarray(self._forward(self._weights[seed], ids))
                exact = exact[len(sample.prompt_ids) - 1 :][range(PARAMS.max_tokens), sample.token_ids]
                np.testing.assert_allclose(sample.logprobs[these], exact[these], atol=1e-4)
            start = int(sample.versions[0]) if first is None else first
            n = int((sample.versions == start).sum())
            undisturbed = self.tokens[seed_of[start]][sample.key, sample.seed]
            assert sample.token_ids[:n].tolist() == undisturbed[:n]


def tokens(groups: list[Group]) -> dict[Any, list[int]]:
    return {(s.key, s.seed): s.token_ids.tolist() for group in groups for s in group.samples}


@pytest.fixture(scope="module")
def expected() -> Iterator[Expected]:
    expected = Expected()
    with expected.llm:
        yield expected


class Workers:
    """An engine of two worker processes, whose updates are watched."""

    def __init__(self, folder: Path, watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._watcher = folder, watcher
        self._ready, self._changed = set[int](), threading.Condition()
        self._events = list[str]()
        take_current = RemoteWorkers._take_current

        def watched(engine: RemoteWorkers, frame: Frame) -> None:
            take_current(engine, frame)
            if frame.kind is READY:
                with self._changed:
                    self._ready.add(frame.stage)
                    self._changed.notify_all()

        monkeypatch.setattr(RemoteWorkers, "_take_current", watched)
        self.seed_of = {0: 0}  # by version
        self.llm = LLM(
            f"{HERE}:watched_model",
            **SIZES,
            **STAGES,
            restarts=RestartBound(restarts=1000),
            on_event=self._events.append,
        )

    def seed(self) -> int:
        """The seed of the weights that the engine says it has."""
        return self.seed_of[self.llm.weights_version]

    def pid(self, stage: int) -> int:
        words = f"stage {stage + 1}: its process (pid "
        started = [event for event in self._events if event.startswith(words) and "was started" in event]
        return int(started[-1].removeprefix(words).split(")")[0])

    def killed_update(self, rollout: Rollout, step: Path, stage: int, tenth: int, death: Death) -> int | None:
        """Update; a stage waits at a tenth, until the other one is ready and somebody dies.

        Returns the new version, or None if all have the old weights.
        """
        hold, other = self._watcher.hold(f"stage {stage + 1}", tenth), 1 - stage
        self._ready.clear()
        with ThreadPoolExecutor(1) as thread:
            update = thread.submit(rollout.update, step)
            assert hold.reached.wait(SOON) and hold.pid == self.pid(stage)
            with self._changed:
                assert self._changed.wait_for(lambda: other in self._ready, SOON)
            if death == "its step is gone":
                step.rename(self._folder / "gone")
            os.kill(self.pid(other) if death == "the other one" else hold.pid, signal.SIGKILL)
            try:
                if death != "the other one":
                    hold.go.set()
                return update.result()
            except CheckpointError as error:
                if "all continue as before" not in str(error):
                    raise
                return None
            finally:
                hold.go.set()

    def died(self, expected: Expected, tenth: int, death: Death) -> None:
        """Kill a worker under a rollout, and see which weights there are, and each of its tokens."""
        now = self.seed()
        seed, stage = 3 - now if now else 1, tenth % 2
        step = self._folder / f"step-{tenth}"
        save(step, seed)
        paused = pause_after(self.llm, BEGUN)
        with Rollout(self.llm) as rollout:
            submit_all(rollout)
            assert paused.wait(SOON)
            version = self.killed_update(rollout, step, stage, tenth, death)
            if version is not None:
                self.seed_of[version] = seed
            assert (version is not None) == (death == "its step stays")
            assert self.llm.weights_version == max(self.seed_of)
            self.llm.resume()
            groups = rollout.take(4)
            expected.check(groups, self.seed_of)
            assert version is not None or tokens(groups) == expected.tokens[now]
            submit_all(rollout)
            assert tokens(rollout.take(4)) == expected.tokens[self.seed()]
        shutil.rmtree(self._folder / "gone", ignore_errors=True)


@pytest.mark.parametrize(
    ("death", "tenths"),
    [
        ("its step is gone", [5]),
        *(pytest.param(death, [*range(11)], marks=pytest.mark.long) for death in DEATHS),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)}",
)
@pytest.mark.timeout(900)
def test_a_worker(
    tmp_path: Path,
    watcher: Watcher,
    monkeypatch: pytest.MonkeyPatch,
    expected: Expected,
    death: Death,
    tenths: list[int],
) -> None:
    """Whether the workers that start again can read the new step decides, and whether one was ready."""
    workers = Workers(tmp_path, watcher, monkeypatch)
    with workers.llm as llm:
        if len(tenths) > 1:  # otherwise the old weights are those that the model began with
            save(tmp_path / "first", 1)
            workers.seed_of[llm.update_weights(tmp_path / "first")] = 1
        before = llm.weights_version
        for tenth in tenths:
            workers.died(expected, tenth, death)
        assert llm.weights_version == before + len(tenths) * (death == "its step stays")


@pytest.mark.parametrize(
    "tenths",
    [[5, 10], pytest.param([*range(11)], marks=pytest.mark.long)],
    ids=lambda tenths: f"{len(tenths)}",
)
@pytest.mark.timeout(600)
def test_the_trainer_that_saves_a_step(
    tmp_path: Path, watcher: Watcher, expected: Expected, tenths: list[int]
) -> None:
    """Whether its step is complete decides, although the step is written in its place."""
    llm, events = expected.llm, list[str]()
    expected.use(1)
    seed_of = {llm.weights_version: 1}
    follower = CheckpointFollower(tmp_path, llm.controls, on_event=events.append)
    for tenth in tenths:
        now, complete = llm.weights_version, tenth == 10
        hold, step = watcher.hold(TRAINER, tenth), tmp_path / f"step-{now + 1}"
        paused = pause_after(llm, BEGUN)
        with Rollout(llm) as rollout, started("save", step, 3 - seed_of[now]) as trainer:
            submit_all(rollout)
            assert paused.wait(SOON) and hold.reached.wait(SOON)
            trainer.kill()
            assert trainer.wait() == -signal.SIGKILL and hold.pid == trainer.pid
            assert follower.look() == complete
            assert llm.weights_version == now + complete
            if complete:
                seed_of[now + 1] = 3 - seed_of[now]
            else:
                assert f"step {now + 1} is left out until its files change" in events[-1]
            llm.resume()
            groups = rollout.take(4)
        expected.check(groups, seed_of)
        assert complete or tokens(groups) == expected.tokens[seed_of[now]]
        assert {int(s.versions[-1]) for group in groups for s in group.samples} == {now + complete}
        hold.go.set()
        shutil.rmtree(step)


@pytest.mark.parametrize(
    "tenths", [[8], pytest.param([*range(11)], marks=pytest.mark.long)], ids=lambda tenths: f"{len(tenths)}"
)
@pytest.mark.timeout(900)
def test_the_process_of_trainer_and_engine(
    tmp_path: Path,
    watcher: Watcher,
    monkeypatch: pytest.MonkeyPatch,
    expected: Expected,
    tenths: list[int],
) -> None:
    """Whichever weights the next process has, the rollout's tokens stay, and the rest is of those weights.

    Five tenths are spent on sending the arrays, the others on replacing weights.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    for tenth in tenths:
        sends = tenth < 5
        who = TRAINER if sends else f"stage {1 + tenth % 2}"
        hold, state = watcher.hold(who, 2 * tenth if sends else 2 * (tenth - 5)), tmp_path / f"{tenth}"
        with started("roll_out", state, 1) as trainer:
            assert hold.reached.wait(SOON)
            trainer.kill()
            assert trainer.wait() == -signal.SIGKILL
        hold.go.set()
        for pid in watcher.pids - {os.getpid()}:
            wait_for_end(pid)
        written = json.loads(state.read_text())
        begun = {
            (group["key"], sample["seed"]): sample["turn"]["token_ids"]
            for group in written["groups"]
            for sample in group["samples"]
        }
        assert len(begun) == 8 and max(map(len, begun.values())) >= BEGUN
        for seed in (0, 1):
            expected.use(seed)
            with Rollout(expected.llm, state=written) as rollout:
                groups = rollout.take(4)
            expected.check(groups, {0: 0, expected.llm.weights_version: seed}, first=0)
            found = tokens(groups)
            assert all(found[name][: len(ids)] == ids for name, ids in begun.items())
            assert (found == expected.tokens[0]) == (seed == 0)
        # What it had sent is removed by whoever sends next.
        assert len([*(tmp_path / "t").glob("orca-sent-weights-*")]) == 1


@contextmanager
def started(program: str, path: Path, seed: int) -> Iterator[subprocess.Popen[bytes]]:
    """One of the programs of watched_update.py, which is killed at the end."""
    process = subprocess.Popen([sys.executable, "-m", HERE, program, path, f"{seed}"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(SOON * 1000), f"process {pid} is still there"
    finally:
        os.close(descriptor)
