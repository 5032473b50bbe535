"""The engine master's control lines: a channel.Channel over gRPC, one stream to each worker."""

import time
from collections.abc import Callable, Sequence

from orca_jax.control.bounded_queue import FrameQueue
from orca_jax.control.handshake import MASTER, JoinTerms, WorkerAbout, control_address
from orca_jax.control.line import ControlLine, Deliver, LineLimits
from orca_jax.engine.channel import Arrival
from orca_jax.errors import ConfigError, OrcaError

_LOOK_SECONDS = 0.2
_FIRST_WORD_SECONDS, _NEXT_WORD_SECONDS = 5.0, 30.0


class ControlChannel:
    """Lines to all workers, joined when this is made: `addresses[i]` is that of stage i.

    It is "host:port", "[v6]:port" or "unix:/absolute/path", and `terms[i]` is what the worker there must be.
    All are waited for together, `seconds` at most, and `on_wait` is told now and then who is missing. Raises
    WorkerRefused where a worker is another than that, or knows another secret, WorkerUnreachable where none
    answers, and meanwhile what `failure` returns, which says why a worker will never be there; whatever was
    joined by then is left again.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        terms: Sequence[JoinTerms],
        *,
        secret: str,
        seconds: float = 30.0,
        limits: LineLimits | None = None,
        failure: Callable[[], OrcaError | None] = lambda: None,
        on_wait: Callable[[str], None] = lambda line: None,
    ) -> None:
        if len(addresses) != len(terms) or not addresses or len(set(addresses)) != len(addresses):
            message = f"{len(addresses)} addresses of workers came, {', '.join(addresses)}, for {len(terms)} "
            raise ConfigError(message + "stages; each stage needs one, and its own")
        for address in addresses:
            control_address(address)
        limits = limits or LineLimits()
        self._inbox = FrameQueue[Arrival](limits.frames, weigh=lambda arrival: len(arrival.data or b""))
        self._lines = [
            ControlLine(
                address, role=MASTER, terms=of, secret=secret, deliver=self._deliver(stage), limits=limits
            )
            for stage, (address, of) in enumerate(zip(addresses, terms, strict=True))
        ]
        try:
            self._wait_joined(seconds, failure, on_wait)
        except OrcaError:
            self.close()
            raise

    @property
    def about(self) -> list[WorkerAbout]:
        """What each stage's worker reported about itself when it was last joined."""
        reports = [line.about for line in self._lines]
        assert all(about is not None for about in reports), "all were joined when this was made"
        return [about for about in reports if about is not None]

    def send(self, stage: int, data: bytes) -> None:
        """Send a frame without waiting; dropped while the line is broken."""
        self._lines[stage].send(data)

    def receive(self, timeout: float) -> Arrival | None:
        """The next that came over any line; None when nothing has within `timeout` seconds."""
        return self._inbox.get(timeout)

    def close(self) -> None:
        """End all lines and their threads, each within `close_seconds`."""
        self._inbox.end()
        for line in self._lines:
            line.close()

    def _wait_joined(
        self, seconds: float, failure: Callable[[], OrcaError | None], on_wait: Callable[[str], None]
    ) -> None:
        began = time.monotonic()
        tell_at = began + _FIRST_WORD_SECONDS
        waiting = self._lines
        while waiting := [line for line in waiting if not line.wait_joined(_LOOK_SECONDS / len(waiting))]:
            error = failure()
            if error is not None:
                raise error
            now = time.monotonic()
            if now >= began + seconds:
                raise waiting[0].not_joined(seconds)
            if now >= tell_at:
                tell_at = now + _NEXT_WORD_SECONDS
                on_wait("waiting for " + "; ".join(line.missing() for line in waiting))

    def _deliver(self, stage: int) -> Deliver:
        def deliver(data: bytes | None, why: str) -> bool:
            # That a line broke is told even where frames have no room: a line breaks seldom.
            return self._inbox.put(Arrival(stage, data, why), beyond_limit=data is None)

        return deliver
