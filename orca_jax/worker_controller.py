"""A worker's controller: takes control messages, passes them on, and issues work without waiting (ORCA 4.1).

One for each stage, in the stage's process. It reacts to what it is told, on one thread: `take` when a frame
came, `started`, `done` and `failed` when its device has news, `overdue` when time has passed.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from orca_jax.config import Deadlines
from orca_jax.control import ControlMessage
from orca_jax.control_frame import (
    DONE,
    MESSAGE,
    READY,
    RECEIVED,
    START,
    TOKENS,
    TROUBLE,
    Frame,
    FrameKind,
    decode_frame,
    encode_frame,
    encode_tokens,
)
from orca_jax.control_wire import ControlWire
from orca_jax.errors import BadFrame


class StageDevice(Protocol):
    """One stage's devices. Neither method waits; their news goes to the controller, on its thread."""

    def start(self, epoch: int) -> None:
        """Give up what was issued before and make new caches; then `started(epoch)`, or `failed`."""
        ...

    def run(self, epoch: int, iteration: int, message: ControlMessage) -> None:
        """Issue this stage's part of an iteration; then `done(epoch, iteration, ...)`, or `failed`.

        Its hidden states come from the stage before and go to the one behind under the key (epoch,
        iteration, stage). Iterations run, and are told done, in the order in which they are issued.
        """
        ...


class Lines(Protocol):
    """A controller's lines; neither method waits, and what cannot be sent is dropped."""

    def forward(self, data: bytes) -> None:
        """To the controller of the next stage; not called by the last."""
        ...

    def report(self, data: bytes) -> None:
        """To the engine master."""
        ...


@dataclass(slots=True)
class ControllerCounters:
    """What came and was not acted on."""

    stale: int = 0  # of an epoch before
    duplicates: int = 0
    rubbish: int = 0


class Controller:
    """The state of one stage: no epoch, an epoch that starts, one that runs, or one that was given up.

    In an epoch it takes iterations 0, 1, 2, ... and each once. What it cannot go on from, a gap or a failure
    of its device, makes it give the epoch up and say so; the master then begins the next one.
    """

    def __init__(
        self,
        stage: int,
        n_stages: int,
        *,
        lines: Lines,
        device: StageDevice,
        wire: ControlWire,
        clock: Callable[[], float],
        deadlines: Deadlines,
    ) -> None:
        assert 0 <= stage < n_stages
        self.counters = ControllerCounters()
        self.epoch = 0  # 0: none yet
        self._stage = stage
        self._last = stage == n_stages - 1
        self._lines = lines
        self._device = device
        self._wire = wire
        self._clock = clock
        self._deadlines = deadlines
        self._starting = False
        self._running = False  # neither: no epoch, or it was given up
        self._next = 0  # the iteration that is due
        self._issued: deque[tuple[int, int]] = deque()  # iterations at the device, each with its rows
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
        elif frame.kind is START:
            self._start(frame.epoch)
        elif frame.kind is MESSAGE:
            self._take_message(frame, data)
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

    def done(self, epoch: int, iteration: int, token_ids: npt.NDArray[np.int32] | None = None) -> None:
        """The device has run its part of an iteration; on the last stage with the tokens.

        They are int32, one a row, and at least as many as the message has rows: padding is cut off here.
        """
        if epoch != self.epoch or not self._running:
            return
        issued, n_rows = self._issued.popleft()
        assert issued == iteration, f"iteration {iteration} is done before {issued}"
        self._waits_since = self._clock() if self._issued else math.inf
        if self._last:
            assert token_ids is not None
            self._report(TOKENS, iteration, encode_tokens(token_ids[:n_rows]))
        else:
            self._report(DONE, iteration)

    def failed(self, epoch: int, why: str) -> None:
        """The device cannot go on in this epoch."""
        if epoch == self.epoch and (self._starting or self._running):
            self._give_up(why)

    def deadline(self) -> float:
        """When `overdue` is to be asked; infinity while nothing is waited for."""
        return self._waits_since + self._deadlines.worker_seconds

    def overdue(self) -> str | None:
        """Why the process must exit: its device has hung for too long, and nothing else ends that."""
        if self._clock() < self.deadline():
            return None
        what = (
            "new caches" if self._starting else f"iteration {self._issued[0][0]}" if self._issued else "work"
        )
        why = f"the device did not finish {what} within {self._deadlines.worker_seconds:g} seconds; "
        why += "the worker exits"
        if self._starting:  # the master still asks whether it is ready, and the next process will be
            self._starting = False
            self._waits_since = math.inf
        else:
            self._give_up(why)
        return why

    def _start(self, epoch: int) -> None:
        if epoch == self.epoch:
            if self._running:
                self._report(READY)  # the first answer may be lost
            elif not self._starting:
                self._report(TROUBLE, payload=b"it has given this epoch up")
            return
        self.epoch = epoch
        self._starting = True
        self._running = False
        self._next = 0
        self._issued.clear()
        self._waits_since = self._clock()
        self._device.start(epoch)

    def _take_message(self, frame: Frame, data: bytes) -> None:
        if frame.epoch > self.epoch or not self._running:
            # It may be that this process is new, and the master does not know yet.
            self._report(TROUBLE, payload=b"it has no caches for this epoch", epoch=frame.epoch)
            return
        iteration = frame.iteration
        if iteration < self._next:
            self.counters.duplicates += 1
            return
        if iteration > self._next:
            self._give_up(f"iteration {iteration} came, and {self._next} did not")
            return
        # First on, so that the next stage prepares while this one's device still works.
        if not self._last:
            self._lines.forward(data)
        self._report(RECEIVED, iteration)
        self._next += 1
        try:
            message = self._wire.decode(frame.payload)
        except BadFrame as error:
            self._rubbish(error)
            return
        if not self._issued:
            self._waits_since = self._clock()
        self._issued.append((iteration, len(message.row)))
        self._device.run(self.epoch, iteration, message)

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
        self._report(TROUBLE, payload=why.encode())

    def _report(
        self, kind: FrameKind, iteration: int = 0, payload: bytes = b"", *, epoch: int | None = None
    ) -> None:
        epoch = self.epoch if epoch is None else epoch
        self._lines.report(encode_frame(Frame(kind, epoch, iteration, self._stage, payload)))
