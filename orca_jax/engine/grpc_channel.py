"""The engine master's control lines: a Channel over gRPC, with one stream to each worker."""

import time
from collections.abc import Callable, Sequence

from orca_jax.control.bounded_queue import FrameQueue
from orca_jax.control.handshake import MASTER, JoinTerms, WorkerAbout, control_address
from orca_jax.control.line import ControlLine, Deliver, LineLimits
from orca_jax.engine.remote_workers import Arrival
from orca_jax.errors import ConfigError, OrcaError

_LOOK_SECONDS = 0.2
_FIRST_NOTICE_SECONDS, _NEXT_NOTICE_SECONDS = 5.0, 30.0


class ControlChannel:
    """Lines to all workers; the constructor joins them all.

    `addresses()[i]` is stage i's present address, "host:port", "[v6]:port" or "unix:/absolute/path", and its
    worker must match `terms[i]`; `addresses` must not block. The constructor waits at most `seconds` for all
    workers together, and meanwhile calls `on_wait` now and then with the missing ones.

    Raises WorkerRefused if a worker has other terms or another secret, WorkerUnreachable if one does not
    answer, and the error that `failure` returns if a worker will never come up. On an error it closes the
    lines already joined.
    """

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        terms: Sequence[JoinTerms],
        *,
        secret: str,
        seconds: float = 30.0,
        limits: LineLimits | None = None,
        failure: Callable[[], OrcaError | None] = lambda: None,
        on_wait: Callable[[str], None] = lambda line: None,
    ) -> None:
        present = addresses()
        if len(present) != len(terms) or not present or len(set(present)) != len(present):
            message = f"there are {len(present)} worker addresses, {', '.join(present)}, for {len(terms)} "
            raise ConfigError(message + "stages; give each stage one address of its own")
        for address in present:
            control_address(address)
        self._present = addresses
        self._addresses = list(present)
        self._terms = list(terms)
        self._secret = secret
        self._limits = limits or LineLimits()
        self._inbox = FrameQueue[Arrival](self._limits.frames, weigh=lambda arrival: len(arrival.data or b""))
        self._lines = [self._line(stage) for stage in range(len(terms))]
        try:
            self._wait_joined(seconds, failure, on_wait)
        except OrcaError:
            self.close()
            raise

    @property
    def about(self) -> list[WorkerAbout]:
        """Each stage's worker's report about itself from its last join."""
        reports = [line.about for line in self._lines]
        assert all(about is not None for about in reports), "the constructor joined them all"
        return [about for about in reports if about is not None]

    def follow(self) -> Sequence[str]:
        """Each stage's worker's address now; the line to one that has moved joins it there."""
        for stage, address in enumerate(self._present()):
            if address != self._addresses[stage]:
                self._lines[stage].close()
                self._addresses[stage] = address
                self._lines[stage] = self._line(stage)
        return tuple(self._addresses)

    def send(self, stage: int, data: bytes) -> None:
        self._lines[stage].send(data)

    def receive(self, timeout: float) -> Arrival | None:
        return self._inbox.get(timeout)

    def close(self) -> None:
        """Close all lines and their threads, each within `close_seconds`."""
        self._inbox.end()
        for line in self._lines:
            line.close()

    def _wait_joined(
        self, seconds: float, failure: Callable[[], OrcaError | None], on_wait: Callable[[str], None]
    ) -> None:
        began = time.monotonic()
        notify_at = began + _FIRST_NOTICE_SECONDS
        pause = _LOOK_SECONDS / len(self._lines)
        while waiting := [line for line in self._lines if line.about is None and not line.wait_joined(pause)]:
            self.follow()
            error = failure()
            if error is not None:
                raise error
            now = time.monotonic()
            if now >= began + seconds:
                raise waiting[0].not_joined(seconds)
            if now >= notify_at:
                notify_at = now + _NEXT_NOTICE_SECONDS
                on_wait("waiting for " + "; ".join(line.missing() for line in waiting))

    def _line(self, stage: int) -> ControlLine:
        return ControlLine(
            self._addresses[stage],
            role=MASTER,
            terms=self._terms[stage],
            secret=self._secret,
            deliver=self._deliver(stage),
            limits=self._limits,
        )

    def _deliver(self, stage: int) -> Deliver:
        def deliver(data: bytes | None, why: str) -> bool:
            # A broken line is reported even when the queue is full; lines break rarely.
            return self._inbox.put(Arrival(stage, data, why), beyond_limit=data is None)

        return deliver
