"""Plays a trace against a server from several processes, so that the client is not the limit.

Requests are dealt to the processes in turn, and a conversation's turns go to one of them. Every process has
its own event loop and connections; they begin at one moment of the system's monotonic clock.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection as PlayerPipe
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from typing import TYPE_CHECKING, Any

from server.errors import ClientEnded
from server.load.client import Outcome, Played, Share, Target, play
from server.load.trace import Trace, TracedRequest

if TYPE_CHECKING:
    Counter = Synchronized[int]

_START_SECONDS = 0.25  # from the last process's readiness to the first request
_PROGRESS_SECONDS = 0.1
STREAMS_A_PROCESS = 64
BUSY, LATE_SECONDS = 0.9, 0.02  # a client that is busier, or sends later than that, was the limit


@dataclass(frozen=True, slots=True)
class Run:
    """One play of a trace as its clients saw it, in the order of the trace.

    `cpu` is the processor time of all clients in seconds, `busiest` the largest share of a core that one of
    them used. With a limit of `concurrency` requests wait for others, and so are not sent as planned.
    """

    outcomes: list[Outcome]
    cpu: float
    busiest: float
    concurrency: int | None

    @property
    def limit(self) -> str | None:
        """Why the client may have been what was measured; None if it was not."""
        if self.busiest > BUSY:
            return f"a client's process used {self.busiest:.0%} of a core; give more --processes"
        late = sorted(one.sent - one.planned for one in self.outcomes)
        by = late[int(0.99 * (len(late) - 1))]
        if self.concurrency is None and by > LATE_SECONDS:
            return f"1 % of the requests were sent late, by {by * 1e3:.0f} ms or more"
        return None


def n_processes(n_streams: int) -> int:
    """The number of processes for so many concurrent streams: at most one for each core."""
    return max(1, min(os.cpu_count() or 1, -(-n_streams // STREAMS_A_PROCESS)))


def shares(trace: Trace, n: int) -> list[tuple[list[int], list[TracedRequest]]]:
    """Deal a trace to `n` processes: indices and requests; the turns of a conversation stay together."""
    place: list[int] = []
    dealt: list[tuple[list[int], list[TracedRequest]]] = [([], []) for _ in range(n)]
    n_first = 0
    for i, request in enumerate(trace):
        if request.after is None:
            place.append(n_first % n)
            n_first += 1
        else:
            place.append(place[request.after])
        indices, requests = dealt[place[i]]
        indices.append(i)
        requests.append(request)
    return [each for each in dealt if each[0]]


class Players:
    """A context manager around the clients' processes, each with a pipe for shares and what was played."""

    def __init__(self, n: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ended: Counter = context.Value("l", 0)
        self._processes: list[tuple[BaseProcess, PlayerPipe]] = []
        for _ in range(n):
            pipe, other_end = context.Pipe()
            process = context.Process(target=_serve, args=(other_end, self._ended), daemon=True)
            process.start()
            other_end.close()
            self._processes.append((process, pipe))

    def __enter__(self) -> "Players":
        self._collect([pipe for _, pipe in self._processes], lambda n: None)  # each says that it is ready
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in self._processes:
            pipe.close()
            process.terminate()
            process.join()

    def play(
        self,
        trace: Trace,
        target: Target,
        *,
        concurrency: int | None,
        on_progress: Callable[[int], object] = lambda n: None,
    ) -> Run:
        """Play a trace once; `on_progress` receives the number of ended requests.

        At most `concurrency` requests run at once, over all processes; None: as many as arrive.
        """
        n = len(self._processes)
        dealt = shares(trace, min(n, concurrency or n))
        limits = _split(concurrency, len(dealt))
        with self._ended.get_lock():
            self._ended.value = 0
        start = time.monotonic() + _START_SECONDS
        pipes = [pipe for _, pipe in self._processes[: len(dealt)]]
        for pipe, (indices, requests), limit in zip(pipes, dealt, limits, strict=True):
            pipe.send(Share(target, requests, indices, start, limit))
        played: list[Played] = self._collect(pipes, on_progress)
        outcomes = sorted((one for each in played for one in each.outcomes), key=lambda one: one.index)
        busiest = max((each.cpu / each.seconds for each in played if each.seconds > 0), default=0.0)
        return Run(outcomes, sum(each.cpu for each in played), busiest, concurrency)

    def _collect(self, pipes: Sequence[PlayerPipe], on_progress: Callable[[int], object]) -> list[Any]:
        """Receive one object from each pipe. Raises ClientEnded if a process is gone."""
        waiting, received = set(pipes), list[Any]()
        while waiting:
            for pipe in connection.wait(waiting, _PROGRESS_SECONDS):
                assert isinstance(pipe, PlayerPipe)
                try:
                    received.append(pipe.recv())
                except EOFError as error:
                    raise ClientEnded("a process of the load client ended before its requests did") from error
                waiting.discard(pipe)
            on_progress(self._ended.value)
        return received


def _split(concurrency: int | None, n: int) -> Sequence[int | None]:
    if concurrency is None:
        return [None] * n
    return [concurrency // n + (i < concurrency % n) for i in range(n)]


def _serve(pipe: PlayerPipe, ended: "Counter") -> None:
    """In a client's process: play each share that comes, until the other end closes."""

    def on_end() -> None:
        with ended.get_lock():
            ended.value += 1

    try:
        pipe.send(None)
        while True:
            pipe.send(play(pipe.recv(), on_end))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
