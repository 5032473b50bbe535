"""A peer's side of the pipe: questions and answers are lines of JSON, and what a library prints is no answer.

Needs the standard library alone: an engine's environment may have neither this project nor JAX.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

# Variables that may change how fast an engine is; what is secret goes into no record.
_TOLD = ("CUDA_", "JAX_", "KMP_", "LD_PRELOAD", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH", "VLLM_", "XLA_")
_SECRET = ("KEY", "SECRET", "TOKEN")


@dataclass(frozen=True)
class Asked:
    """A request of a trace; `arrival` in seconds after the trace's start."""

    prompt: Sequence[int]
    n_output: int
    arrival: float


class Playing:
    """A trace while an engine plays it: which requests have arrived, and when each was done.

    Its clock starts when it is made. `done` may be called from any thread, the rest from one.
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
        """Requests that `done` was told of."""
        return len(self._latency)

    @property
    def is_done(self) -> bool:
        """Is every request?"""
        return self.n_done == len(self.requests)

    def arrived(self, most: int | None = None) -> list[int]:
        """Indices of the requests that have arrived and were not given before, oldest first; no wait."""
        taken: list[int] = []
        while len(taken) != most and self.until_next() == 0.0:
            taken.append(self._n_taken)
            self._n_taken += 1
        return taken

    def until_next(self) -> float | None:
        """Seconds until `arrived` has one more; None when it has given all."""
        if self._n_taken == len(self.requests):
            return None
        return max(0.0, self.requests[self._n_taken].arrival - self._now())

    def next_arrivals(self, most: int | None = None) -> list[int]:
        """The same, but sleeps until there is one at least; empty when all were given."""
        while (seconds := self.until_next()) is not None:
            time.sleep(seconds)
            if indices := self.arrived(most):
                return indices
        return []

    def done(self, index: int, token_ids: Sequence[int]) -> None:
        """All of a request's output is there, now."""
        self._latency[index] = self._now() - self.requests[index].arrival
        self._token_ids[index] = token_ids

    def answer(self) -> dict[str, Any]:
        """What was measured: `seconds` until the last was done, and of each request, in their order, its
        `latency` in seconds from its arrival in the trace, whenever the engine took it, and its output's
        `token_ids`.
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
    """Start an engine as the first line says, tell about it, and play a trace for each line until they end.

    `start(flags, closing)` gives the way to play a trace and what is to be known of the engine: versions,
    flags; what ends the engine it leaves in `closing`.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # an engine's own prints go where its warnings go

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    with ExitStack() as closing:
        play, about = start(json.loads(sys.stdin.readline()), closing)
        say({**about, "variables": told_variables()})
        for line in sys.stdin:
            said = json.loads(line)
            rows = zip(said["prompts"], said["n_outputs"], said["arrivals"], strict=True)
            playing = Playing([Asked(*row) for row in rows])
            play(playing)
            say(playing.answer())


def told_variables() -> dict[str, str]:
    """Of this process's environment, what may matter to speed."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_TOLD) and not any(word in name for word in _SECRET)
    }
