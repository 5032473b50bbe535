"""A worker's controller: takes control messages, forwards them, and issues work without waiting (ORCA 4.1).

Each stage's process has one. It reacts to events, on one thread: `take` when a frame arrives, `started`,
`done` and `failed` when its device reports, `overdue` when time has passed.
"""

import math
from collections import deque
from collections.abc import Callable
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
from orca_jax.control.sampled_wire import Asked, asked, encode_sampled
from orca_jax.control.start_order import StartOrder, decode_start
from orca_jax.errors import BadFrame
from orca_jax.iteration.message import ControlMessage
from orca_jax.request.sampled import Sampled

_MOST_AHEAD = 4096  # iterations that words may come before their message


class StageDevice(Protocol):
    """One stage's devices. Neither method waits; their news goes to the controller, on its thread."""

    def start(self, epoch: int, order: StartOrder) -> bool:
        """Give up what was issued before and make new caches; then `started(epoch)`, or `failed`.

        True where programs have to be made first, which takes longer.
        """
        ...

    def allow(self, epoch: int, iteration: int, words: npt.NDArray[np.int32]) -> None:
        """The allowed tokens of an iteration's constrained rows, flat. The last stage waits for them before
        it samples; they may come before the iteration's message.
        """
        ...

    def run(self, epoch: int, iteration: int, message: ControlMessage) -> None:
        """Issue this stage's part of an iteration; then `done(epoch, iteration, ...)`, or `failed`.

        Its hidden states come from the stage before and go to the next under the key (epoch,
        iteration, stage). Iterations run, and are told done, in the order in which they are issued.
        """
        ...


class Lines(Protocol):
    """A controller's lines; no method waits, and what cannot be sent is dropped."""

    def connect(self, address: str) -> None:
        """The next stage's worker is there; called at each new START, but not by the last stage."""
        ...

    def forward(self, data: bytes) -> None:
        """To the controller of the next stage; not called by the last."""
        ...

    def report(self, data: bytes) -> None:
        """To the engine master."""
        ...


@dataclass(frozen=True, slots=True)
class _Issued:
    """An iteration at the device; `data` is its frame, where that is held back until the device is done."""

    iteration: int
    asked: Asked
    data: bytes | None


@dataclass(slots=True)
class ControllerCounters:
    """What came and was not acted on."""

    stale: int = 0  # of an epoch before
    duplicates: int = 0
    rubbish: int = 0


class Controller:
    """The state of one stage: no epoch, an epoch that starts, one that runs, or one that was given up.

    In an epoch it takes iterations 0, 1, 2, ... and each once. What it cannot go on from, a gap or a failure
    of its device, makes it give the epoch up and say so; the master then begins the next one. The sizes of
    the engine and the time that its device has are those of the epoch's START.

    With `forward_ahead` a message goes to the next stage as soon as it is taken (ORCA 4.1), without it when
    this stage's device is done: only to measure what the former is worth, because a master that misses a
    deadline then may name the next stage.
    """

    def __init__(
        self,
        stage: int,
        n_stages: int,
        *,
        lines: Lines,
        device: StageDevice,
        clock: Callable[[], float],
        forward_ahead: bool = True,
    ) -> None:
        assert 0 <= stage < n_stages
        self.counters = ControllerCounters()
        self.epoch = 0  # 0: none yet
        self._stage = stage
        self._last = stage == n_stages - 1
        self._lines = lines
        self._device = device
        self._clock = clock
        self._forward_ahead = forward_ahead
        self._order: StartOrder | None = None  # of this epoch
        self._makes_programs = False
        self._starting = False
        self._running = False  # neither: no epoch, or it was given up
        self._next = 0  # the iteration that is due
        self._issued: deque[_Issued] = deque()
        self._waits_since = math.inf

    # Told by the process around it.

    def take(self, data: bytes) -> None:
        """A frame came, from the master or from the stage before."""
        try:
            frame = decode_frame(data)
        except BadFrame as error:
            self._rubbish(error)
            return
        if frame.epoch < self.epoch:
            self.counters.stale += 1
            if frame.kind is START:  # perhaps of a new master, whose clock is behind that of the one before
                self._report(PASSED)
        elif frame.kind is START:
            self._take_start(frame)
        elif frame.kind is MESSAGE:
            self._take_message(frame, data)
        elif frame.kind is WORDS:
            self._take_words(frame)
        else:
            self._rubbish(BadFrame(f"{frame.kind.name} came, which a worker only sends"))

    def started(self, epoch: int) -> None:
        """The device has new caches for this epoch."""
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
    ) -> None:
        """The device has run its part of an iteration; on the last stage with what it sampled.

        `link_bytes` are what the stage put on the link to the next one for this iteration.
        """
        if epoch != self.epoch or not self._running:
            return
        issued = self._issued.popleft()
        assert issued.iteration == iteration, f"iteration {iteration} is done before {issued.iteration}"
        now = self._clock()
        self._waits_since = now if self._issued else math.inf
        if self._last:
            assert sampled is not None
            self._report(TOKENS, iteration, encode_sampled(sampled, issued.asked))
            return
        if issued.data is not None:
            self._lines.forward(issued.data)
        self._report(DONE, iteration, encode_stage_time(StageTime(now, link_bytes)))

    def failed(self, epoch: int, why: str) -> None:
        """The device cannot go on in this epoch."""
        if epoch == self.epoch and (self._starting or self._running):
            self._give_up(why)

    def deadline(self) -> float:
        """When `overdue` is to be asked; infinity while nothing is waited for."""
        return self._waits_since + self._patience()

    def overdue(self) -> str | None:
        """Why the process must exit: its device has hung for too long, and nothing else ends that."""
        if self._clock() < self.deadline():
            return None
        if self._starting:
            what = "programs and new caches" if self._makes_programs else "new caches"
        else:
            what = f"iteration {self._issued[0].iteration}"
        why = f"the device did not finish {what} within {self._patience():g} seconds; the worker exits"
        if self._starting:  # the master still asks whether it is ready, and the next process will be
            self._starting = False
            self._waits_since = math.inf
        else:
            self._give_up(why)
        return why

    def _patience(self) -> float:
        """How long the device may take for what is waited for, in seconds."""
        if self._order is None:
            return math.inf
        programs = self._starting and self._makes_programs
        return self._order.ready_seconds if programs else self._order.worker_seconds

    def _take_start(self, frame: Frame) -> None:
        try:
            order = decode_start(frame.payload)
            if not self._last and not order.next_address:
                raise BadFrame("a start order came without the next stage's address")
            if frame.epoch == self.epoch and order != self._order:
                raise BadFrame("another start order came for the same epoch")
        except BadFrame as error:
            self._rubbish(error)
            return
        if frame.epoch == self.epoch:
            if self._running:
                self._report(READY)  # the first answer may be lost
            elif not self._starting:
                self._report(TROUBLE, payload="it has given this epoch up")
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
        self._makes_programs = self._device.start(frame.epoch, order)

    def _take_message(self, frame: Frame, data: bytes) -> None:
        if frame.epoch > self.epoch or not self._running:
            # It may be that this process is new, and the master does not know yet.
            self._report(TROUBLE, payload="it has no caches for this epoch", epoch=frame.epoch)
            return
        iteration = frame.iteration
        if iteration < self._next:
            self.counters.duplicates += 1
            return
        if iteration > self._next:
            self._give_up(f"iteration {iteration} came, and {self._next} did not")
            return
        now = self._clock()
        # First on, so that the next stage prepares while this one's device still works.
        if self._forward_ahead and not self._last:
            self._lines.forward(data)
        self._report(RECEIVED, iteration, encode_stage_time(StageTime(now, 0)))
        self._next += 1
        assert self._order is not None
        try:
            message = decode_message(frame.payload, self._order.shape)
        except BadFrame as error:
            self._rubbish(error)
            return
        if not self._issued:
            self._waits_since = now
        held_back = None if self._forward_ahead else data
        self._issued.append(_Issued(iteration, asked(message), held_back))
        self._device.run(self.epoch, iteration, message)

    def _take_words(self, frame: Frame) -> None:
        if frame.epoch > self.epoch or not self._running:
            return  # the answer to its message will say why
        if not self._last or len(frame.payload) % 4 or frame.iteration > self._next + _MOST_AHEAD:
            self._rubbish(BadFrame(f"{len(frame.payload)} bytes of words came, for another stage or time"))
            return
        is_done = frame.iteration < (self._issued[0].iteration if self._issued else self._next)
        if is_done:
            self.counters.duplicates += 1
            return
        words = np.frombuffer(frame.payload, "<i4").astype(np.int32, copy=False)
        self._device.allow(self.epoch, frame.iteration, words)

    def _rubbish(self, error: BadFrame) -> None:
        """Nothing tells what it was: a message that is missed now would be a gap later."""
        self.counters.rubbish += 1
        if self._starting or self._running:
            self._give_up(f"rubbish came: {error}")

    def _give_up(self, why: str) -> None:
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
