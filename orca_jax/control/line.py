"""The calling end of a control line: one gRPC stream to a worker, with automatic reconnection.

The engine master has a line to each worker, and each worker has one to the next.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import grpc

from orca_jax.control.bounded_queue import FrameQueue
from orca_jax.control.frame import MAX_FRAME
from orca_jax.control.handshake import (
    JOINED,
    METHOD,
    OPTIONS,
    JoinTerms,
    WorkerAbout,
    about_of,
    metadata,
)
from orca_jax.errors import WorkerRefused, WorkerUnreachable

# A retry cannot succeed: the operator has to change how a side is started.
_FINAL = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
)
_REFUSED = (*_FINAL, grpc.StatusCode.ALREADY_EXISTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class LineLimits:
    """Limits of a control line; times are in seconds.

    At most `frames` wait to be sent. A worker must accept a caller within `join_seconds`. A broken line
    reconnects with delays that double from `first_delay` to `longest_delay`, for `reconnect_seconds`; after
    that, or after a refusal, it retries only when there is a frame to send. `close` takes at most
    `close_seconds`.
    """

    frames: int = 4096
    join_seconds: float = 5.0
    first_delay: float = 0.05
    longest_delay: float = 1.0
    reconnect_seconds: float = 300.0
    close_seconds: float = 5.0


class Deliver(Protocol):
    """Accepts a frame, or None with the reason why the line broke; must not block.

    Returns False when there is no room for the frame; the line then breaks.
    """

    def __call__(self, data: bytes | None, why: str) -> bool:
        """See the class."""
        ...


class ControlLine:
    """One line to the worker at `address`, which handshake.control_address must be able to parse.

    The line's thread calls `deliver`. It reports a broken line once and a refusal once; it does not report
    failed attempts to reconnect. When a worker calls the next one, `data_address` is where it offers its
    hidden states. `about` is the peer's report about itself from the last successful join.
    """

    def __init__(
        self,
        address: str,
        *,
        role: str,
        terms: JoinTerms,
        secret: str,
        deliver: Deliver,
        limits: LineLimits,
        data_address: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.about: WorkerAbout | None = None
        self._address = address
        self._metadata = metadata(role, terms, secret, data_address)
        self._deliver = deliver
        self._limits = limits
        self._clock = clock
        self._name = f"the worker of stage {terms.stage + 1} at {address}"
        self._changed = threading.Condition()  # guards the fields below
        self._call: Any = None
        self._outbox: FrameQueue[bytes] | None = None  # while joined
        self._why = ""  # why this end broke the call
        self._failure: tuple[grpc.StatusCode, str] | None = None  # of the latest attempt
        self._wanted = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"control line {address}", daemon=True)
        self._thread.start()

    def wait_joined(self, seconds: float) -> bool:
        """Wait until the worker accepts this caller; return False after `seconds`.

        Raises WorkerRefused if the refusal is final.
        """
        with self._changed:
            self._changed.wait_for(self._decided, seconds)
            if self._outbox is None and self._failure is not None and self._failure[0] in _FINAL:
                raise WorkerRefused(f"{self._name} refused the connection: {self._failure[1]}")
            return self._outbox is not None

    def missing(self) -> str:
        """The worker's name, and why its line is not joined yet."""
        with self._changed:
            return f"{self._name}: {self._failure[1] if self._failure else 'it did not answer'}"

    def not_joined(self, seconds: float) -> WorkerRefused | WorkerUnreachable:
        """The error to raise when the line is not joined within `seconds`."""
        with self._changed:
            refused = self._failure is not None and self._failure[0] in _REFUSED
            why = self._failure[1] if self._failure else "it did not answer"
        if refused:
            return WorkerRefused(f"{self._name} refused the connection: {why}")
        message = f"{self._name} was not reached within {seconds:g} seconds: {why}; is one running there?"
        return WorkerUnreachable(message)

    def send(self, data: bytes) -> None:
        """Send a frame without blocking; drops it while the line is broken."""
        with self._changed:
            call, outbox = self._call, self._outbox
            if outbox is None:
                self._wanted = True
                self._changed.notify_all()
                return
        if len(data) > MAX_FRAME:
            self._break(call, f"a frame to send has {len(data)} bytes; up to {MAX_FRAME} are allowed")
        elif not outbox.put(data):
            self._break(call, f"{len(outbox)} frames wait to be sent, but the worker reads none")

    def close(self) -> None:
        """End the line and its thread; drops unsent frames."""
        with self._changed:
            self._closed = True
            call = self._call
            self._changed.notify_all()
        if call is not None:
            call.cancel()
        self._thread.join(self._limits.close_seconds)

    def _decided(self) -> bool:
        """Whether the worker has accepted this caller or finally refused it; call with the lock held."""
        return self._outbox is not None or (self._failure is not None and self._failure[0] in _FINAL)

    def _break(self, call: Any, why: str) -> None:
        with self._changed:
            if self._call is call and not self._why:
                self._why = why
        call.cancel()

    def _run(self) -> None:
        limits = self._limits
        delay, until, reported = limits.first_delay, self._clock() + limits.reconnect_seconds, ""
        while True:
            joined, code, why = self._attempt()
            if joined:
                delay, until, reported = limits.first_delay, self._clock() + limits.reconnect_seconds, ""
            with self._changed:
                if self._closed:
                    return
                self._failure = (code, why)
                self._wanted = False
                self._changed.notify_all()
            if joined or (code in _FINAL and why != reported):
                reported = why
                self._deliver(None, why)
            with self._changed:
                if code in _FINAL or self._clock() >= until:
                    self._changed.wait_for(lambda: self._closed or self._wanted)
                    delay, until = limits.first_delay, self._clock() + limits.reconnect_seconds
                else:
                    self._changed.wait_for(lambda: self._closed, delay)
                    delay = min(2 * delay, limits.longest_delay)
                if self._closed:
                    return

    def _attempt(self) -> tuple[bool, grpc.StatusCode, str]:
        """Call the worker and read until the call ends; return whether it joined, and why it ended."""
        limits = self._limits
        outbox = FrameQueue[bytes](limits.frames, weigh=len)
        joined = False
        with grpc.insecure_channel(self._address, OPTIONS) as channel:
            stub = cast(Any, channel.stream_stream(METHOD))
            call = stub(iter(outbox), metadata=self._metadata)
            late = f"it did not accept the caller within {limits.join_seconds:g} seconds"
            timer = threading.Timer(limits.join_seconds, self._break, (call, late))
            timer.daemon = True
            with self._changed:
                self._call, self._why = call, ""
                closed = self._closed
            if closed:
                call.cancel()
            timer.start()
            try:
                for data in call:
                    if not joined:
                        about = about_of(call.initial_metadata())
                        if data != JOINED or about is None:
                            self._break(call, "it is not an orca_jax worker")
                            continue
                        timer.cancel()
                        joined = True
                        with self._changed:
                            self.about = about
                            self._outbox, self._failure = outbox, None
                            self._changed.notify_all()
                    elif not self._deliver(data, ""):
                        self._break(call, "the queue of received frames is full")
                        break
            except grpc.RpcError:
                pass  # `call.code()` below gives the reason
            finally:
                timer.cancel()
                timer.join()
                outbox.end()  # otherwise the gRPC thread that reads it would wait forever
                with self._changed:
                    self._call = self._outbox = None
                    reason = self._why
            code, details = call.code(), call.details()
        if reason:
            return joined, grpc.StatusCode.CANCELLED, reason
        return joined, code, details or "the worker ended it"
