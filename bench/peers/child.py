"""A peer's end of the pipe: questions and answers are lines of JSON, apart from what libraries print.

Needs only the standard library, because an engine's environment may have neither this project nor JAX.
"""

import heapq
import json
import math
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
    """A request of a trace; `arrival` in seconds after the trace's start.

    The next turn of a conversation has the index of the turn before in `after`. Until that one is answered,
    `prompt` is only what the turn adds to the conversation, and `arrival` counts from the answer.
    """

    prompt: Sequence[int]
    n_output: int
    arrival: float
    after: int | None = None


class Playing:
    """A trace while an engine plays it: which requests have arrived, and when each was done.

    Its clock starts at construction. `first` and `done` may be called from any thread, the other methods from
    one thread. No other play has the same `salt`: an engine with a prefix cache must use it as the requests'
    salt, so that it finds nothing of an earlier play. `streams` says whether first tokens count.
    """

    def __init__(
        self,
        requests: Sequence[Asked],
        clock: Callable[[], float] = time.perf_counter,
        *,
        salt: str = "",
        streams: bool = False,
    ) -> None:
        self.requests = list(requests)
        self.salt = salt
        self.streams = streams
        self._clock = clock
        self._n_taken = 0
        self._turns_after: defaultdict[int | None, list[int]] = defaultdict(list)
        for i, request in enumerate(requests):
            self._turns_after[request.after].append(i)
        self._due = [(requests[i].arrival, i) for i in self._turns_after[None]]
        heapq.heapify(self._due)
        self._changed = threading.Condition()
        self._token_ids: dict[int, Sequence[int]] = {}
        self._first: dict[int, float] = {}
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
        with self._changed:
            while len(taken) != most and self._due and self._due[0][0] <= self._now():
                taken.append(heapq.heappop(self._due)[1])
            self._n_taken += len(taken)
        return taken

    def until_next(self) -> float | None:
        """Seconds until `arrived` has another request: infinity if that depends on an answer, None after the
        last.
        """
        with self._changed:
            return self._until_next()

    def next_arrivals(self, most: int | None = None) -> list[int]:
        """Sleep until `arrived` has at least one request, and return them; empty after the last."""
        while True:
            with self._changed:
                seconds = self._until_next()
                if seconds is None:
                    return []
                if seconds:
                    self._changed.wait(None if seconds == math.inf else seconds)
            if indices := self.arrived(most):
                return indices

    def first(self, index: int) -> None:
        """Record that the first token of a request's output is known now; later calls change nothing."""
        self._first.setdefault(index, self._now() - self.requests[index].arrival)

    def done(self, index: int, token_ids: Sequence[int]) -> None:
        """Record that a request's output is complete now."""
        self.first(index)
        now = self._now()
        with self._changed:
            self._latency[index] = now - self.requests[index].arrival
            self._token_ids[index] = token_ids
            for i in self._turns_after[index]:
                turn = self.requests[i]
                prompt = [*self.requests[index].prompt, *token_ids, *turn.prompt]
                self.requests[i] = replace(turn, prompt=prompt, arrival=now + turn.arrival)
                heapq.heappush(self._due, (self.requests[i].arrival, i))
            self._changed.notify_all()

    def answer(self) -> dict[str, Any]:
        """The measurements: `seconds` until the last request was done, and for each request, in order, its
        `latency` and the time to its `first_token` in seconds since its arrival, and its output's
        `token_ids`.
        """
        indices = range(len(self.requests))
        return {
            "seconds": max(self._latency[i] + self.requests[i].arrival for i in indices),
            "latency": [self._latency[i] for i in indices],
            "first_token": [self._first[i] for i in indices] if self.streams else None,
            "token_ids": [list(self._token_ids[i]) for i in indices],
        }

    def _until_next(self) -> float | None:
        if self._n_taken == len(self.requests):
            return None
        return max(0.0, self._due[0][0] - self._now()) if self._due else math.inf

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
            rows = zip(
                *(question[name] for name in ("prompts", "n_outputs", "arrivals", "after")), strict=True
            )
            requests = [Asked(*row) for row in rows]
            playing = Playing(requests, salt=question["salt"], streams=question["streams"])
            play(playing)
            send(playing.answer())


def environment_variables() -> dict[str, str]:
    """The variables of this process's environment that may affect speed."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_RECORDED) and not any(word in name for word in _SECRET)
    }
