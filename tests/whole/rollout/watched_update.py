"""Updates that a test follows weight by weight, and the processes in which it may end them.

Whoever moves weights here reports each one to the test's `Watcher`, and goes on when that answers: the worker
processes of `watched_model` as they replace them, and two trainers, which are programs of this file:

    python -m tests.whole.rollout.watched_update save DIRECTORY SEED
    python -m tests.whole.rollout.watched_update roll_out STATE SEED
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.own_model import GatedModel
from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.safetensors_writer import Tensor, write_files
from orca_jax.execution.stage import StageWeights
from orca_jax.launch import module_update
from orca_jax.rollout import Rollout
from tests.whole.pauses import pause_after

HERE = "tests.whole.rollout.watched_update"
ADDRESS = "ORCA_TESTS_WATCHER"  # of the test's watcher, in the environment of the processes
TRAINER = "the trainer"
SOON = 120.0
BEGUN = 10  # tokens of an output when the update comes
SIZES: dict[str, Any] = {
    "max_batch_size": 8, "n_slots": 1024, "max_batch_tokens": 16, "block_size": 4, "dtype": "float32",
}  # fmt: skip
STAGES: dict[str, Any] = {"pipeline_parallel": 2, "worker_processes": True}
PARAMS = SamplingParams(n=2, max_tokens=40, temperature=1.0, ignore_eos=True, logprobs=0, seed=5)
PROMPTS = [[1, 2, 3], [*range(40, 55)], [7], [*range(40, 52), 9]]


def watched_model() -> GatedModel:
    """A model whose weights are watched if a worker process makes it."""
    if Path(sys.argv[0]).name == "worker_process.py":
        watch_replaced(f"stage {json.loads(sys.argv[1])['stage'] + 1}")
    return GatedModel(vocab_size=64)


def weights(seed: int) -> nnx.State:
    """Weights of the model; with seed 0 those that it begins with."""
    rng, state = np.random.default_rng(seed), nnx.state(GatedModel(vocab_size=64), nnx.Param)
    return jax.tree.map(lambda w: w + jnp.asarray(rng.normal(0, 0.1 * (seed > 0), w.shape), w.dtype), state)


def save(directory: Path, seed: int, on_weight: Callable[[int, int], None] = lambda i, n: None) -> None:
    """Write weights as a step, in place; `on_weight` is told of each, and of the end."""
    leaves = nnx.to_flat_state(weights(seed))
    named = {".".join(map(str, path)): np.array(variable[...]) for path, variable in leaves}

    def tensor(i: int, name: str, values: np.ndarray) -> Tensor:
        def read() -> np.ndarray:
            on_weight(i, len(named))
            return values

        return Tensor(name, values.shape, values.dtype, read)

    directory.mkdir()
    write_files(directory, [tensor(i, *pair) for i, pair in enumerate(named.items())], 1 << 40)
    on_weight(len(named), len(named))


def submit_all(rollout: Rollout) -> None:
    """Submit a group for each prompt."""
    for i, prompt in enumerate(PROMPTS):
        rollout.submit(prompt, PARAMS, key=f"{i}")


class Hold:
    """A process that waits where the test wants it, at a tenth of its part of an update."""

    def __init__(self, who: str, tenth: float) -> None:
        self.who, self.tenth = who, tenth
        self.reached, self.go = threading.Event(), threading.Event()
        self.pid = 0


class Watcher:
    """Listens to the processes of an update; the one of the present `Hold` waits for it."""

    def __init__(self, address: Path) -> None:
        self.pids = set[int]()  # of all that have connected
        self._hold: Hold | None = None
        self._listener = Listener(str(address), "AF_UNIX")
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self, who: str, tenth: float) -> Hold:
        """Let this process wait in the next update."""
        self._hold = Hold(who, tenth)
        return self._hold

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        try:
            while True:
                who, pid, count, n = connection.recv()
                self.pids.add(pid)
                hold = self._hold
                if hold is not None and hold.who == who and count == round(hold.tenth * n / 10):
                    hold.pid, self._hold = pid, None
                    hold.reached.set()
                    hold.go.wait(SOON)
                connection.send(None)
        except (EOFError, OSError):
            pass  # it was killed


def reporting(who: str) -> Callable[[int, int], None]:
    """A function that reports how many weights of how many are done, and waits for the answer."""
    connection = Client(os.environ[ADDRESS], "AF_UNIX")

    def report(count: int, n: int) -> None:
        connection.send((who, os.getpid(), count, n))
        connection.recv()

    return report


def watch_replaced(who: str) -> None:
    """Report each weight that an update replaces in this process."""
    report, replace, replaced = reporting(who), StageWeights.replace, set[str]()

    def watched(self: StageWeights, name: str, weight: Any) -> None:
        if name in replaced:  # the next update
            replaced.clear()
        if not replaced:
            report(0, len(self._places))
        replace(self, name, weight)
        replaced.add(name)
        report(len(replaced), len(self._places))

    StageWeights.replace = watched


def watch_sent(who: str) -> None:
    """Report each weight that this process sends to its workers."""
    report, write = reporting(who), module_update.orbax.write

    def watched(directory: Path, arrays: Mapping[str, Any], read: Callable[[str], np.ndarray]) -> None:
        sent, lock = 0, threading.Lock()

        def watched_read(name: str) -> np.ndarray:
            nonlocal sent
            with lock:
                report(sent, len(arrays))
                sent += 1
            return read(name)

        write(directory, arrays, watched_read)
        report(len(arrays), len(arrays))

    module_update.orbax.write = watched


def roll_out(state: Path, seed: int) -> None:
    """Sample with worker processes, write the rollout's state down, and send them new weights."""
    watch_sent(TRAINER)
    with LLM(f"{HERE}:watched_model", **SIZES, **STAGES) as llm, Rollout(llm) as rollout:
        paused = pause_after(llm, BEGUN)
        submit_all(rollout)
        assert paused.wait(SOON)
        state.write_text(json.dumps(rollout.state()))
        rollout.update(weights(seed))
        raise AssertionError("the test ends this process before")


if __name__ == "__main__":
    program, path, number = sys.argv[1:]
    if program == "save":
        save(Path(path), int(number), reporting(TRAINER))
    else:
        roll_out(Path(path), int(number))
