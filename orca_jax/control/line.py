"""The calling end of a control line: one gRPC stream to a worker, made again when it breaks.

The engine master has one to each worker, and each worker one to the next.
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

# What trying again does not change: somebody has to start something else.
_FINAL = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
)
_REFUSED = (*_FINAL, grpc.StatusCode.ALREADY_EXISTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class LineLimits:
    """`frames` wait in a queue at most, a worker has `join_seconds` to take a caller, a line that broke is
    tried again after `first_delay` seconds, then twice that and so on up to `longest_delay`, for
    `reconnect_seconds`; after that, or once refused, only when there is a frame to send. Closing takes
    `close_seconds` at most.
    """

    frames: int = 4096
    join_seconds: float = 5.0
    first_delay: float = 0.05
    longest_delay: float = 1.0
    reconnect_seconds: float = 300.0
    close_seconds: float = 5.0


class Deliver(Protocol):
    """Takes what came over a line, without waiting: a frame, or None and why the line broke.

    False: there is no room for the frame, and the line breaks.
    """

    def __call__(self, data: bytes | None, why: str) -> bool:
        """See the class."""
        ...


class ControlLine:
    """One line to the worker at `address`, which handshake.control_address could read.

    A thread of its own calls `deliver`. A line that was joined and broke is told once, and so is a refusal;
    attempts that fail are not. `data_address`, of a worker that calls the next one, is where its hidden
    states are to be had. `about` is what the worker said of itself when it last took this caller.
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
        self._changed = threading.Condition()  # for all below
        self._call: Any = None
        self._outbox: FrameQueue[bytes] | None = None  # while joined
        self._why = ""  # why this end broke the call
        self._failure: tuple[grpc.StatusCode, str] | None = None  # of the newest attempt
        self._wanted = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"control line {address}", daemon=True)
        self._thread.start()

    def wait_joined(self, seconds: float) -> bool:
        """Until the worker has taken this caller; False when it has not within `seconds`.

        Raises WorkerRefused where it never will.
        """
        with self._changed:
            self._changed.wait_for(self._decided, seconds)
            if self._outbox is None and self._failure is not None and self._failure[0] in _FINAL:
                raise WorkerRefused(f"{self._name} refused: {self._failure[1]}")
            return self._outbox is not None

    def missing(self) -> str:
        """Whose line this is, and why it is not joined yet."""
        with self._changed:
            return f"{self._name}: {self._failure[1] if self._failure else 'it did not answer'}"

    def not_joined(self, seconds: float) -> WorkerRefused | WorkerUnreachable:
        """What to raise when it was not joined within `seconds`."""
        with self._changed:
            refused = self._failure is not None and self._failure[0] in _REFUSED
            why = self._failure[1] if self._failure else "it did not answer"
        if refused:
            return WorkerRefused(f"{self._name} refused: {why}")
        message = f"{self._name} was not reached within {seconds:g} seconds: {why}; is one started there?"
        return WorkerUnreachable(message)

    def send(self, data: bytes) -> None:
        """Send a frame without waiting; dropped while the line is broken."""
        with self._changed:
            call, outbox = self._call, self._outbox
            if outbox is None:
                self._wanted = True
                self._changed.notify_all()
                return
        if len(data) > MAX_FRAME:
            self._break(call, f"a frame of {len(data)} bytes was to be sent; up to {MAX_FRAME} are allowed")
        elif not outbox.put(data):
            self._break(call, f"{len(outbox)} frames wait to be sent, and the worker takes none")

    def close(self) -> None:
        """End the line and its thread; what was not sent is dropped."""
        with self._changed:
            self._closed = True
            call = self._call
            self._changed.notify_all()
        if call is not None:
            call.cancel()
        self._thread.join(self._limits.close_seconds)

    def _decided(self) -> bool:
        """Whether the worker has taken this caller, or refused it for good; with the lock."""
        return self._outbox is not None or (self._failure is not None and self._failure[0] in _FINAL)

    def _break(self, call: Any, why: str) -> None:
        with self._changed:
            if self._call is call and not self._why:
                self._why = why
        call.cancel()

    def _run(self) -> None:
        limits = self._limits
        delay, until, told = limits.first_delay, self._clock() + limits.reconnect_seconds, ""
        while True:
            joined, code, why = self._attempt()
            if joined:
                delay, until, told = limits.first_delay, self._clock() + limits.reconnect_seconds, ""
            with self._changed:
                if self._closed:
                    return
                self._failure = (code, why)
                self._wanted = False
                self._changed.notify_all()
            if joined or (code in _FINAL and why != told):
                told = why
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
        """Call, and read until the call ends: was it joined, and why did it end."""
        limits = self._limits
        outbox = FrameQueue[bytes](limits.frames, weigh=len)
        joined = False
        with grpc.insecure_channel(self._address, OPTIONS) as channel:
            stub = cast(Any, channel.stream_stream(METHOD))
            call = stub(iter(outbox), metadata=self._metadata)
            late = f"it did not take the caller within {limits.join_seconds:g} seconds"
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
                            self._break(call, "it is no worker of orca_jax")
                            continue
                        timer.cancel()
                        joined = True
                        with self._changed:
                            self.about = about
                            self._outbox, self._failure = outbox, None
                            self._changed.notify_all()
                    elif not self._deliver(data, ""):
                        self._break(call, "more frames came than there is room for")
                        break
            except grpc.RpcError:
                pass  # the call says below what it was
            finally:
                timer.cancel()
                timer.join()
                outbox.end()  # or the thread of gRPC that reads it would wait for ever
                with self._changed:
                    self._call = self._outbox = None
                    mine = self._why
            code, details = call.code(), call.details()
        if mine:
            return joined, grpc.StatusCode.CANCELLED, mine
        return joined, code, details or "the worker ended it"
