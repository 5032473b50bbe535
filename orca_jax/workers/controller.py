"""A worker's controller: takes control messages, forwards them and issues work without waiting (ORCA 4.1).

Each stage's process has one. It handles events on one thread: `take` when a frame arrives; `started`, `done`
and `failed` when its device reports; `overdue` when time has passed.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from orca_jax.control.frame import (
    DONE,
    MESSAGE,
    PASSED,
    READY,
    RECEIVED,
    START,
    TOKENS,
    TROUBLE,
    WORDS,
    Frame,
    FrameKind,
    StageTime,
    decode_frame,
    encode_frame,
    encode_stage_time,
)
from orca_jax.control.message_wire import decode_message
from orca_jax.control.sampled_wire import ExpectedRecords, encode_routed, encode_sampled, expected_records
from orca_jax.control.start_order import StartOrder, decode_start
from orca_jax.errors import BadFrame
from orca_jax.iteration.message import ControlMessage
from orca_jax.request.routed_experts import ExpertIds
from orca_jax.request.sampled import Sampled

_MOST_AHEAD = 4096  # iterations by which words may precede their message


class StageDevice(Protocol):
    """One stage's devices. No method blocks; the device calls the controller back on the latter's thread."""

    def start(self, epoch: int, order: StartOrder) -> bool:
        """Drop all earlier work and make new caches, then call `started(epoch)` or `failed`.

        Returns True if programs must be compiled or weights moved first, which takes longer.
        """
        ...

    def allow(self, epoch: int, iteration: int, words: npt.NDArray[np.int32]) -> None:
        """Take the allowed tokens of an iteration's constrained rows, flat.

        The last stage waits for them before it samples. They may arrive before the iteration's message.
        """
        ...

    def run(self, epoch: int, iteration: int, message: ControlMessage) -> None:
        """Issue this stage's part of an iteration, then call `done(epoch, iteration, ...)` or `failed`.

        Hidden states come from the previous stage and go to the next under the key (epoch, iteration,
        stage). Iterations run and finish in the order in which they are issued.
        """
        ...


class Lines(Protocol):
    """A controller's lines. No method blocks; a frame that cannot be sent is dropped."""

    def connect(self, address: str) -> None:
        """Set the address of the next stage's worker, at each new START; the last stage does not call it."""
        ...

    def forward(self, data: bytes) -> None:
        """Send a frame to the next stage's controller; the last stage does not call it."""
        ...

    def report(self, data: bytes) -> None:
        """Send a frame to the engine master."""
        ...


@dataclass(frozen=True, slots=True)
class _Issued:
    """An iteration at the device."""

    iteration: int
    expected: ExpectedRecords


@dataclass(slots=True)
class ControllerCounters:
    """Received frames that the controller did not act on."""

    stale: int = 0  # from an earlier epoch
    duplicates: int = 0
    malformed: int = 0


class Controller:
    """The state of one stage: it has no epoch, or its epoch is starting, running or abandoned.

    In each epoch it takes iterations 0, 1, 2, ... once each. After a gap or a device failure it abandons the
    epoch and reports TROUBLE; the master then begins the next epoch. Each epoch's START sets the engine's
    sizes and the device's deadlines.

    A message goes to the next stage as soon as it is taken, ahead of this stage's device (ORCA 4.1).
    """

    def __init__(
        self,
        stage: int,
        n_stages: int,
        *,
        lines: Lines,
        device: StageDevice,
        clock: Callable[[], float],
    ) -> None:
        assert 0 <= stage < n_stages
        self.counters = ControllerCounters()
        self.epoch = 0  # 0 before the first START
        self._stage = stage
        self._last = stage == n_stages - 1
        self._lines = lines
        self._device = device
        self._clock = clock
        self._order: StartOrder | None = None  # this epoch's
        self._compiles_first = False
        self._starting = False
        self._running = False  # if neither: there is no epoch, or it is abandoned
        self._next = 0  # the next iteration to take
        self._issued: deque[_Issued] = deque()
        self._waits_since = math.inf

    # The process around the controller calls these methods.

    def take(self, data: bytes) -> None:
        """Handle a frame from the master or the previous stage."""
        try:
            frame = decode_frame(data)
        except BadFrame as error:
            self._reject(error)
            return
        if frame.epoch < self.epoch:
            self.counters.stale += 1
            if frame.kind is START:  # perhaps from a new master whose clock is behind the previous master's
                self._report(PASSED)
        elif frame.kind is START:
            self._take_start(frame)
        elif frame.kind is MESSAGE:
            self._take_message(frame, data)
        elif frame.kind is WORDS:
            self._take_words(frame)
        else:
            self._reject(BadFrame(f"a worker sends {frame.kind.name} and does not accept it"))

    def started(self, epoch: int) -> None:
        """Report READY: the device has new caches for this epoch."""
        if epoch != self.epoch or not self._starting:
            return
        self._starting = False
        self._running = True
        self._waits_since = math.inf
        self._report(READY)

    def done(
        self,
        epoch: int,
        iteration: int,
        sampled: Sampled | None = None,
        *,
        link_bytes: int = 0,
        routed: Mapping[int, ExpertIds] | None = None,
    ) -> None:
        """Report that the device has run its part of an iteration; the last stage reports tokens instead.

        `link_bytes` is the number of bytes that the iteration put on the link to the next stage. `routed` are
        the experts that its tokens chose in this stage, unless it is the last one.
        """
        if epoch != self.epoch or not self._running:
            return
        issued = self._issued.popleft()
        assert issued.iteration == iteration, f"iteration {iteration} finished before {issued.iteration}"
        now = self._clock()
        self._waits_since = now if self._issued else math.inf
        assert self._order is not None
        routing = self._order.shape.routing
        if self._last:
            assert sampled is not None
            self._report(TOKENS, iteration, encode_sampled(sampled, issued.expected, routing))
            return
        ids = encode_routed(routed or {}, issued.expected.routed, routing)
        self._report(DONE, iteration, encode_stage_time(StageTime(now, link_bytes, ids)))

    def failed(self, epoch: int, why: str) -> None:
        """Abandon the epoch: the device cannot continue it."""
        if epoch == self.epoch and (self._starting or self._running):
            self._abandon_epoch(why)

    def deadline(self) -> float:
        """When to call `overdue`; infinity while the device owes no work."""
        return self._waits_since + self._timeout()

    def overdue(self) -> str | None:
        """Why the process must exit: its device hangs, and only the end of the process ends that."""
        if self._clock() < self.deadline():
            return None
        if self._starting:
            work = "programs, weights and new caches" if self._compiles_first else "new caches"
        else:
            work = f"iteration {self._issued[0].iteration}"
        why = f"the device did not finish {work} within {self._timeout():g} seconds; the worker exits"
        if self._starting:  # no TROUBLE: the master keeps asking for READY, and the next process answers
            self._starting = False
            self._waits_since = math.inf
        else:
            self._abandon_epoch(why)
        return why

    def _timeout(self) -> float:
        """Seconds that the device may take for its current work."""
        if self._order is None:
            return math.inf
        compiles = self._starting and self._compiles_first
        return self._order.ready_seconds if compiles else self._order.worker_seconds

    def _take_start(self, frame: Frame) -> None:
        try:
            order = decode_start(frame.payload)
            if not self._last and not order.next_address:
                raise BadFrame("a start order has no address of the next stage")
            if frame.epoch == self.epoch and order != self._order:
                raise BadFrame("a second, different start order came for the same epoch")
        except BadFrame as error:
            self._reject(error)
            return
        if frame.epoch == self.epoch:
            if self._running:
                self._report(READY)  # the first answer may be lost
            elif not self._starting:
                self._report(TROUBLE, payload="it has abandoned this epoch")
            return
        self.epoch = frame.epoch
        self._order = order
        self._starting = True
        self._running = False
        self._next = 0
        self._issued.clear()
        self._waits_since = self._clock()
        if not self._last:
            self._lines.connect(order.next_address)
        self._compiles_first = self._device.start(frame.epoch, order)

    def _take_message(self, frame: Frame, data: bytes) -> None:
        if frame.epoch > self.epoch or not self._running:
            # This process may be new, and the master may not know it yet.
            self._report(TROUBLE, payload="it has no caches for this epoch", epoch=frame.epoch)
            return
        iteration = frame.iteration
        if iteration < self._next:
            self.counters.duplicates += 1
            return
        if iteration > self._next:
            self._abandon_epoch(f"iteration {iteration} came before iteration {self._next}")
            return
        now = self._clock()
        # Forward first, so that the next stage prepares while this stage's device works.
        if not self._last:
            self._lines.forward(data)
        self._report(RECEIVED, iteration, encode_stage_time(StageTime(now, 0)))
        self._next += 1
        assert self._order is not None
        try:
            message = decode_message(frame.payload, self._order.shape)
        except BadFrame as error:
            self._reject(error)
            return
        if not self._issued:
            self._waits_since = now
        self._issued.append(_Issued(iteration, expected_records(message)))
        self._device.run(self.epoch, iteration, message)

    def _take_words(self, frame: Frame) -> None:
        if frame.epoch > self.epoch or not self._running:
            return  # the answer to the iteration's message says why
        if not self._last or len(frame.payload) % 4 or frame.iteration > self._next + _MOST_AHEAD:
            problem = f"{len(frame.payload)} bytes of words came for iteration {frame.iteration}; only the "
            problem += f"last stage takes them, in multiples of 4 and up to {_MOST_AHEAD} iterations ahead"
            self._reject(BadFrame(problem))
            return
        is_done = frame.iteration < (self._issued[0].iteration if self._issued else self._next)
        if is_done:
            self.counters.duplicates += 1
            return
        words = np.frombuffer(frame.payload, "<i4").astype(np.int32, copy=False)
        self._device.allow(self.epoch, frame.iteration, words)

    def _reject(self, error: BadFrame) -> None:
        """Abandon the epoch: the malformed frame may have been a message, which would be a gap later."""
        self.counters.malformed += 1
        if self._starting or self._running:
            self._abandon_epoch(f"a malformed frame came: {error}")

    def _abandon_epoch(self, why: str) -> None:
        self._starting = False
        self._running = False
        self._issued.clear()
        self._waits_since = math.inf
        self._report(TROUBLE, payload=why)

    def _report(
        self, kind: FrameKind, iteration: int = 0, payload: object = None, *, epoch: int | None = None
    ) -> None:
        epoch = self.epoch if epoch is None else epoch
        self._lines.report(encode_frame(Frame(kind, epoch, iteration, self._stage, payload)))
