"""A peer's end of the pipe: questions and answers are lines of JSON, apart from what libraries print.

Needs only the standard library, because an engine's environment may have neither this project nor JAX.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

# Variables that may change an engine's speed, without secrets.
_RECORDED = (
    "CUDA_",
    "JAX_",
    "KMP_",
    "LD_PRELOAD",
    "MKL_",
    "NCCL_",
    "OMP_",
    "PYTORCH_",
    "TORCH",
    "VLLM_",
    "XLA_",
)
_SECRET = ("KEY", "SECRET", "TOKEN")


@dataclass(frozen=True)
class Asked:
    """A request of a trace; `arrival` in seconds after the trace's start."""

    prompt: Sequence[int]
    n_output: int
    arrival: float


class Playing:
    """A trace while an engine plays it: which requests have arrived, and when each was done.

    Its clock starts at construction. `done` may be called from any thread, the other methods from one thread.
    """

    def __init__(self, requests: Sequence[Asked], clock: Callable[[], float] = time.perf_counter) -> None:
        self.requests = requests
        self._clock = clock
        self._n_taken = 0
        self._token_ids: dict[int, Sequence[int]] = {}
        self._latency: dict[int, float] = {}
        self._begin = clock()

    @property
    def n_done(self) -> int:
        """The number of finished requests."""
        return len(self._latency)

    @property
    def is_done(self) -> bool:
        """Whether every request is done."""
        return self.n_done == len(self.requests)

    def arrived(self, most: int | None = None) -> list[int]:
        """Indices of the newly arrived requests, oldest first, without waiting."""
        taken: list[int] = []
        while len(taken) != most and self.until_next() == 0.0:
            taken.append(self._n_taken)
            self._n_taken += 1
        return taken

    def until_next(self) -> float | None:
        """Seconds until `arrived` has another request; None after the last."""
        if self._n_taken == len(self.requests):
            return None
        return max(0.0, self.requests[self._n_taken].arrival - self._now())

    def next_arrivals(self, most: int | None = None) -> list[int]:
        """As `arrived`, but sleeps until there is at least one; empty after the last."""
        while (seconds := self.until_next()) is not None:
            time.sleep(seconds)
            if indices := self.arrived(most):
                return indices
        return []

    def done(self, index: int, token_ids: Sequence[int]) -> None:
        """Record that a request's output is complete now."""
        self._latency[index] = self._now() - self.requests[index].arrival
        self._token_ids[index] = token_ids

    def answer(self) -> dict[str, Any]:
        """The measurements: `seconds` until the last request was done, and for each request, in order, its
        `latency` in seconds since its arrival in the trace, and its output's `token_ids`.
        """
        indices = range(len(self.requests))
        return {
            "seconds": max(self._latency[i] + self.requests[i].arrival for i in indices),
            "latency": [self._latency[i] for i in indices],
            "token_ids": [list(self._token_ids[i]) for i in indices],
        }

    def _now(self) -> float:
        return self._clock() - self._begin


Play = Callable[[Playing], None]  # returns when all requests are done


def serve(start: Callable[[dict[str, Any], ExitStack], tuple[Play, dict[str, Any]]]) -> None:
    """Start an engine with the flags in the first line, describe it, and play a trace for each further line.

    `start(flags, closing)` returns a function that plays a trace and a description of the engine (versions,
    flags). It registers the engine's shutdown in `closing`.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # an engine's prints go to stderr

    def send(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    with ExitStack() as closing:
        play, about = start(json.loads(sys.stdin.readline()), closing)
        send({**about, "variables": environment_variables()})
        for line in sys.stdin:
            question = json.loads(line)
            rows = zip(question["prompts"], question["n_outputs"], question["arrivals"], strict=True)
            playing = Playing([Asked(*row) for row in rows])
            play(playing)
            send(playing.answer())


def environment_variables() -> dict[str, str]:
    """The variables of this process's environment that may affect speed."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_RECORDED) and not any(word in name for word in _SECRET)
    }
