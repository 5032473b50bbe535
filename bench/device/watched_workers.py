"""Observes when each iteration is issued to the device, and when the device has finished it."""

import queue
import threading
import time
from collections.abc import Sequence

from orca_jax.engine.engine_master import PendingTokens, Workers
from orca_jax.iteration.message import ControlMessage, MakeWords


class WatchedWorkers:
    """Workers, and a thread that waits for each iteration's tokens. Iterations must have no constraints.

    `issued[i]` is when the call that issued iteration i had returned, `done[i]` when its tokens were on the
    host; seconds of time.perf_counter.
    """

    def __init__(self, workers: Workers) -> None:
        self.issued: list[float] = []
        self.done: list[float] = []
        self._workers = workers
        self._pending = queue.SimpleQueue[PendingTokens | None]()
        self._thread = threading.Thread(target=self._watch, name="watches iterations", daemon=True)
        self._thread.start()

    def issue(self, message: ControlMessage, words: MakeWords) -> PendingTokens:
        """Issue an iteration on the workers, and record it."""
        pending = self._workers.issue(message, words)
        self.issued.append(time.perf_counter())
        self._pending.put(pending)
        return pending

    def until_done(self, n: int, seconds: float = 60.0) -> None:
        """Wait until `n` iterations are done. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while len(self.done) < n:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self.done)} of {n} iterations were done within {seconds:g} seconds")
            time.sleep(1e-3)

    def close(self) -> None:
        """End the thread."""
        self._pending.put(None)
        self._thread.join()

    def _watch(self) -> None:
        while (pending := self._pending.get()) is not None:
            pending.fetch()
            self.done.append(time.perf_counter())


def gaps(issued: Sequence[float], done: Sequence[float]) -> list[float]:
    """Seconds between iterations in which the device had nothing to do: [len - 1].

    The device has work once an iteration is issued, so an iteration issued before the previous one was done
    leaves no gap.
    """
    return [max(0.0, next_issued - end) for next_issued, end in zip(issued[1:], done, strict=False)]
