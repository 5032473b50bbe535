"""Workers and their lines on a virtual clock, with the real controllers; they fail when they are told to.

The devices compute tokens from what lies in their simulated caches, so that keys and values that were lost,
or belong to another request, give wrong tokens.
"""

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orca_jax.control.frame import READY, RECEIVED, START, TOKENS, Frame, encode_frame
from orca_jax.control.start_order import StartOrder
from orca_jax.control.worker_pb2 import Tokens
from orca_jax.iteration.message import ControlMessage
from orca_jax.iteration.shape import EngineShape
from orca_jax.request.sampled import Sampled
from orca_jax.simulation.lines import SimulatedLines
from orca_jax.simulation.tokens import prefix_digest, through_stage, token_of
from orca_jax.workers.controller import Controller

_LOST = 777_777  # what a cache gives that was never written
HIDDEN_BYTES = 4  # that one row's hidden state takes on the link


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds that things take; `line` and `link` are the ways of control messages and hidden states."""

    line: float = 0.002
    link: float = 0.001
    iteration: float = 0.1  # one stage's part
    caches: float = 0.05  # to make them new
    programs: float = 0.0  # to make them, once in a process
    restart: float = 1.0  # from a process's end to the next one's start
    turn: float = 0.0  # the engine master's own, each time that it goes on
    pulls_hang: bool = False  # a device that waits for a lost neighbour never comes back from it


@dataclass(frozen=True, slots=True)
class Poison:
    """A request that makes the process of a stage die: whenever it computes the output token of this index,
    or with this probability at each iteration.
    """

    stage: int
    token_index: int | None = None
    probability: float = 0.0
    noticed: bool = True  # at once, or by a deadline

    def strikes(self, stage: int, token_index: int, rng: random.Random) -> bool:
        """Whether the process of this stage dies of computing this token."""
        if stage != self.stage:
            return False
        return token_index == self.token_index or rng.random() < self.probability


class SimulatedStageDevice:
    """A stage's device: one iteration after the other, when the stage before has sent its hidden states."""

    def __init__(self, stage: "SimulatedStage") -> None:
        self.wedged = False  # it never finishes anything any more
        self.broken = False  # what it runs next fails
        self._stage = stage
        self._shape: EngineShape
        self._epoch = 0
        self._programs_at = math.inf  # when they are made
        self._cache: dict[int, int] = {}  # by slot
        self._last_token: dict[int, int] = {}  # by row; on the last stage
        self._queue: deque[tuple[int, ControlMessage]] = deque()
        self._arrived: dict[tuple[int, int], list[int]] = {}  # hidden states by epoch and iteration
        self._words: dict[int, npt.NDArray[np.int32]] = {}  # by iteration of this epoch
        self._busy = False

    def start(self, epoch: int, order: StartOrder) -> bool:
        """StageDevice."""
        assert epoch > self._epoch, "epochs grow"
        self._shape = order.shape
        if self._queue and not self._busy and self._stage.timing.pulls_hang:
            self.wedged = True
        self._epoch = epoch
        self._cache.clear()
        self._last_token.clear()
        self._queue.clear()
        self._words.clear()
        self._busy = False
        self._arrived = {key: hidden for key, hidden in self._arrived.items() if key[0] >= epoch}
        now, timing = self._stage.clock.now(), self._stage.timing
        self._programs_at = min(self._programs_at, now + timing.programs)
        seconds = max(0.0, self._programs_at - now)
        self._stage.later(seconds + timing.caches, lambda: self._started(epoch))
        return seconds > 0

    def allow(self, epoch: int, iteration: int, words: npt.NDArray[np.int32]) -> None:
        """StageDevice."""
        assert epoch == self._epoch
        self._words[iteration] = words
        self._go_on()

    def run(self, epoch: int, iteration: int, message: ControlMessage) -> None:
        """StageDevice."""
        assert epoch == self._epoch
        self._queue.append((iteration, message))
        self._go_on()

    def hidden_arrived(self, epoch: int, iteration: int, hidden: list[int]) -> None:
        """The stage before has sent an iteration's hidden states."""
        if epoch >= self._epoch:
            self._arrived[epoch, iteration] = hidden
            self._go_on()

    def _started(self, epoch: int) -> None:
        if not self.wedged and epoch == self._epoch:
            self._stage.controller.started(epoch)

    def _go_on(self) -> None:
        if self._busy or not self._queue:
            return
        key = (self._epoch, self._queue[0][0])
        if self._stage.index and key not in self._arrived:
            return
        constrained = self._queue[0][1].constrained.any()
        if self._stage.next is None and constrained and key[1] not in self._words:
            return
        self._busy = True
        self._stage.later(self._stage.timing.iteration, lambda: self._finish(*key))

    def _finish(self, epoch: int, iteration: int) -> None:
        if self.wedged or epoch != self._epoch:
            return
        if self.broken:
            self.broken = False
            self._queue.clear()
            self._busy = False
            self._stage.controller.failed(epoch, "the device failed")
            return
        _, message = self._queue.popleft()
        self._busy = False
        if self._stage.is_poisoned(message):
            return
        hidden = self._arrived.pop((epoch, iteration), [0] * len(message.row))
        out = self._compute(message, hidden)
        sampled, link_bytes = None, 0
        if self._stage.next is None:
            keys = zip(out, message.sampling["seed"].tolist(), message.token_index.tolist(), strict=True)
            tokens = [token_of(*key, self._shape.vocab_size) for key in keys]
            self._constrain(tokens, message, iteration)
            newest = zip(message.row.tolist(), tokens, message.samples.tolist(), strict=True)
            self._last_token.update((row, token) for row, token, is_sampled in newest if is_sampled)
            sampled = Sampled(np.array(tokens, np.int32))
        else:
            self._stage.send_hidden(epoch, iteration, out)
            link_bytes = HIDDEN_BYTES * len(out)
        self._stage.controller.done(epoch, iteration, sampled, link_bytes=link_bytes)
        self._go_on()

    def _constrain(self, tokens: list[int], message: ControlMessage, iteration: int) -> None:
        """Go on from each token that may not come to the next that may."""
        rows = np.flatnonzero(message.constrained).tolist()
        if not rows:
            return
        vocab_size = self._shape.vocab_size
        words = self._words.pop(iteration).reshape(len(rows), -1)
        for i, own in zip(rows, words, strict=True):
            bits = np.unpackbits(own.view(np.uint8), bitorder="little")
            while not bits[tokens[i]]:
                tokens[i] = (tokens[i] + 1) % vocab_size

    def _compute(self, message: ControlMessage, hidden: list[int]) -> list[int]:
        size, cache = self._shape.block_size, self._cache
        known = message.token_ids.tolist()
        if message.token_on_device.any():  # then this stage is the last one as well
            starts = (np.cumsum(message.input_length) - message.input_length).tolist()
            for start, row, on_device in zip(
                starts, message.row.tolist(), message.token_on_device.tolist(), strict=True
            ):
                if on_device:
                    known[start] = self._last_token.get(row, _LOST)
        token_ids = iter(known)
        lengths = zip(message.kv_length.tolist(), message.input_length.tolist(), strict=True)
        out: list[int] = []
        for (kv_length, input_length), blocks, incoming in zip(
            lengths, message.block_table.tolist(), hidden, strict=True
        ):
            digest = 0
            for position in range(max(0, kv_length - input_length - 1), kv_length):
                slot = blocks[position // size] * size + position % size
                if position < kv_length - input_length:
                    digest = cache.get(slot, _LOST)
                else:
                    digest = cache[slot] = prefix_digest(digest, next(token_ids))
            out.append(through_stage(incoming, digest))
        return out


class SimulatedStage:
    """A worker process: a controller and its device, that die, stop, lie and come back when told to."""

    def __init__(
        self,
        index: int,
        n_stages: int,
        *,
        lines: SimulatedLines,
        timing: Timing,
        forward_ahead: bool = True,
    ) -> None:
        self.index = index
        self.timing = timing
        self.poisons: dict[int, Poison] = {}  # by the seed of the request
        self.rng = random.Random(index)
        self.next: SimulatedStage | None = None
        self.alive = False
        self._n_stages = n_stages
        self._lines = lines
        self._forward_ahead = forward_ahead
        self.clock = lines.clock
        self._life = 0  # which process of this stage it is
        self._n_stops = 0  # of the stops in force, all but the longest are over when this says so
        self._stopped = False
        self._backlog: list[Callable[[], object]] = []
        self._check_at = math.inf
        self.begin()

    def begin(self) -> None:
        """A new process, if the one before is dead."""
        if self.alive:
            return
        self.alive = True
        self.began = self.clock.now()
        self._life += 1
        self._stopped = False
        self._backlog.clear()
        self._check_at = math.inf
        self._next_address: str | None = None
        self.device = SimulatedStageDevice(self)
        self.controller = Controller(
            self.index,
            self._n_stages,
            lines=self,
            device=self.device,
            clock=self.clock.now,
            forward_ahead=self._forward_ahead,
        )

    def die(self, back_after: float, *, noticed: bool) -> None:
        """The process ends; the master's line breaks at once, if that is noticed."""
        if not self.alive:
            return
        self.alive = False
        if noticed:
            self._lines.broken(self.index)
        if back_after < math.inf:
            self.clock.call_at(self.clock.now() + back_after, self.begin)

    def is_poisoned(self, message: ControlMessage) -> bool:
        """Whether the process has died of this iteration."""
        if not self.poisons:
            return False
        token_indices = np.where(message.samples, message.token_index, -1)  # -1: no token is computed
        for seed, token_index in zip(message.sampling["seed"].tolist(), token_indices.tolist(), strict=True):
            poison = self.poisons.get(seed)
            if poison is not None and poison.strikes(self.index, token_index, self.rng):
                self.die(self.timing.restart, noticed=poison.noticed)
                return True
        return False

    def stop(self, seconds: float) -> None:
        """As by SIGSTOP; what is for it waits until it goes on."""
        self._stopped = True
        self._n_stops += 1
        stop, life = self._n_stops, self._life

        def go_on() -> None:
            if (stop, life) == (self._n_stops, self._life):
                self._stopped = False
                backlog, self._backlog = self._backlog, []
                for action in backlog:
                    self._do(action)

        if seconds < math.inf:
            self.clock.call_at(self.clock.now() + seconds, go_on)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Let the process, if it lives then, do something."""
        life = self._life
        self.clock.call_at(self.clock.now() + seconds, lambda: self._do(action, life))

    def take(self, data: bytes) -> None:
        """A frame arrives; a dead process takes none."""
        self._do(lambda: self.controller.take(data))

    def send_hidden(self, epoch: int, iteration: int, hidden: list[int]) -> None:
        """Over the link to the next stage, whichever process that is by then."""
        behind = self.next
        assert behind is not None
        at = self.clock.now() + self.timing.link
        self.clock.call_at(
            at, lambda: behind._do(lambda: behind.device.hidden_arrived(epoch, iteration, hidden))
        )

    def lie(self, which: int) -> None:
        """Say something well-formed that is not so."""
        if not self.alive or self._stopped:
            return
        epoch, stage = self.controller.epoch, self.index
        ids = Tokens(token_ids=np.array([0, 1 << 30], "<i4").tobytes())
        lies = (
            Frame(TOKENS, epoch, 0, stage, ids),
            Frame(TOKENS, epoch, 1 << 40, stage, ids),
            Frame(READY, epoch + 5, 0, stage),
            Frame(RECEIVED, epoch, 3, stage + 1),
            Frame(START, epoch, 0, stage),
            Frame(RECEIVED, epoch, 0, stage),
        )
        self.report(encode_frame(lies[which % len(lies)]))

    def connect(self, address: str) -> None:
        """Lines. An address is the number of a stage."""
        self._next_address = address

    def forward(self, data: bytes) -> None:
        """Lines."""
        assert self._next_address is not None, "it was never told where the next stage is"
        self._lines.to_stage(int(self._next_address), data)

    def report(self, data: bytes) -> None:
        """Lines."""
        self._lines.to_master(self.index, data)

    def _do(self, action: Callable[[], object], life: int | None = None) -> None:
        if not self.alive or (life is not None and life != self._life):
            return
        if self._stopped:
            self._backlog.append(action)
            return
        action()
        self._watch()

    def _watch(self) -> None:
        """Ask for the worker's own deadline when it has come; a process past it exits."""
        deadline = self.controller.deadline()
        if self.alive and deadline < self._check_at:
            self._check_at = deadline
            self.later(max(0.0, deadline - self.clock.now()), self._check)

    def _check(self) -> None:
        self._check_at = math.inf
        if self.controller.overdue() is not None:
            self.die(self.timing.restart, noticed=True)
