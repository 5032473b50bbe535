"""Simulated workers on a virtual clock, with real controllers; they fail on request.

The devices compute tokens from simulated caches, so that lost keys and values, or those of another request,
give wrong tokens.
"""

import math
import random
import signal
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
from orca_jax.workers.controller import Controller
from orca_jax.workers.loss_cause import ProcessState
from tests.host.simulation.lines import SimulatedLines
from tests.host.simulation.tokens import prefix_digest, through_stage, token_of

_LOST = 777_777  # the value of a cache slot that was never written
CRASHED, KILLED = -signal.SIGSEGV, -signal.SIGKILL  # statuses of processes, as in ProcessState
HIDDEN_BYTES = 4  # bytes of one row's hidden state on the link


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Durations in seconds; control messages take `line`, and hidden states `link`."""

    line: float = 0.002
    link: float = 0.001
    iteration: float = 0.1  # one stage's part of an iteration
    caches: float = 0.05  # making new caches
    programs: float = 0.0  # compiling programs, once per process
    restart: float = 1.0  # from the end of a process to the start of the next one
    turn: float = 0.0  # each turn of the engine master
    pulls_hang: bool = False  # whether a device that waits for a lost neighbour hangs forever


@dataclass(frozen=True, slots=True)
class Poison:
    """A request that kills a stage's process when it computes output token `token_index`.

    With `token_index` None it does so at each iteration with `probability`. `status` is how the process ends,
    as in ProcessState.
    """

    stage: int
    token_index: int | None = None
    probability: float = 0.0
    noticed: bool = True  # whether the master notices at once, and not only by a deadline
    status: int = CRASHED

    def strikes(self, stage: int, token_index: int, rng: random.Random) -> bool:
        """Whether computing this token kills this stage's process."""
        if stage != self.stage:
            return False
        return token_index == self.token_index or rng.random() < self.probability


class SimulatedStageDevice:
    """A stage's device: runs each iteration in order once the previous stage has sent its hidden states."""

    def __init__(self, stage: "SimulatedStage") -> None:
        self.hangs = False  # whether it never finishes anything again
        self.fails_next = False  # whether its next iteration fails
        self._stage = stage
        self._shape: EngineShape
        self._epoch = 0
        self._programs_at = math.inf  # when the programs are compiled
        self._cache: dict[int, int] = {}  # by slot
        self._last_token: dict[int, int] = {}  # by row, on the last stage
        self._queue: deque[tuple[int, ControlMessage]] = deque()
        self._arrived: dict[tuple[int, int], list[int]] = {}  # hidden states by epoch and iteration
        self._words: dict[int, npt.NDArray[np.int32]] = {}  # by iteration of this epoch
        self._busy = False

    def start(self, epoch: int, order: StartOrder) -> bool:
        """As in StageDevice."""
        assert epoch > self._epoch, "epochs increase"
        self._shape = order.shape
        if self._queue and not self._busy and self._stage.timing.pulls_hang:
            self.hangs = True
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

        def started() -> None:
            if not self.hangs and epoch == self._epoch:
                self._stage.controller.started(epoch)

        self._stage.later(seconds + timing.caches, started)
        return seconds > 0

    def allow(self, epoch: int, iteration: int, words: npt.NDArray[np.int32]) -> None:
        """As in StageDevice."""
        assert epoch == self._epoch
        self._words[iteration] = words
        self._continue()

    def run(self, epoch: int, iteration: int, message: ControlMessage) -> None:
        """As in StageDevice."""
        assert epoch == self._epoch
        self._queue.append((iteration, message))
        self._continue()

    def hidden_arrived(self, epoch: int, iteration: int, hidden: list[int]) -> None:
        """Take an iteration's hidden states from the previous stage."""
        if epoch >= self._epoch:
            self._arrived[epoch, iteration] = hidden
            self._continue()

    def _continue(self) -> None:
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
        if self.hangs or epoch != self._epoch:
            return
        if self.fails_next:
            self.fails_next = False
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
        self._continue()

    def _constrain(self, tokens: list[int], message: ControlMessage, iteration: int) -> None:
        """Replace each forbidden token by the next allowed one."""
        rows = np.flatnonzero(message.constrained).tolist()
        if not rows:
            return
        vocab_size = self._shape.vocab_size
        words = self._words.pop(iteration).reshape(len(rows), -1)
        for i, mask in zip(rows, words, strict=True):
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            while not bits[tokens[i]]:
                tokens[i] = (tokens[i] + 1) % vocab_size

    def _compute(self, message: ControlMessage, hidden: list[int]) -> list[int]:
        size, cache = self._shape.block_size, self._cache
        known = message.token_ids.tolist()
        if message.token_on_device.any():  # only if this stage is also the last
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
    """A worker process: a controller and its device, which die, stop, lie and restart on request.

    With `moves`, each new process has another address.
    """

    def __init__(
        self, index: int, n_stages: int, *, lines: SimulatedLines, timing: Timing, moves: bool = False
    ) -> None:
        self.index = index
        self.timing = timing
        self.poisons: dict[int, Poison] = {}  # by the request's seed
        self.rng = random.Random(index)
        self.next: SimulatedStage | None = None
        self.alive = False
        self.states: list[ProcessState] = []  # of processes that ended or were stopped, until `forget_states`
        self._n_stages = n_stages
        self._lines = lines
        self._moves = moves
        self.clock = lines.clock
        self.n_processes = 0  # so far
        self._n_stops = 0  # a stop ends only if no later stop has begun
        self._stopped = False
        self._backlog: list[Callable[[], object]] = []
        self._check_at = math.inf
        self.begin()

    @property
    def address(self) -> str:
        """As in TakesFrames."""
        return f"stage {self.index}, process {self.n_processes if self._moves else 1}"

    def begin(self) -> None:
        """Start a new process if the previous one is dead."""
        if self.alive:
            return
        self.alive = True
        self.began = self.clock.now()
        self.n_processes += 1
        self._stopped = False
        self._backlog.clear()
        self._check_at = math.inf
        self._next_address: str | None = None
        self.device = SimulatedStageDevice(self)
        self.controller = Controller(
            self.index, self._n_stages, lines=self, device=self.device, clock=self.clock.now
        )

    def forget_states(self) -> None:
        """Forget how earlier processes ended, because the stage is ready."""
        self.states.clear()

    def die(
        self, back_after: float, *, noticed: bool, status: int = CRASHED, was_suspect: bool = False
    ) -> None:
        """End the process; if `noticed`, the master's line breaks at once."""
        if not self.alive:
            return
        self.alive = False
        self.states.append(ProcessState(status, was_suspect=was_suspect))
        if noticed:
            self._lines.broken(self.index)
        if back_after < math.inf:
            self.clock.call_at(self.clock.now() + back_after, self.begin)

    def is_poisoned(self, message: ControlMessage) -> bool:
        """Whether this iteration has killed the process."""
        if not self.poisons:
            return False
        token_indices = np.where(message.samples, message.token_index, -1)  # -1: no token is computed
        for seed, token_index in zip(message.sampling["seed"].tolist(), token_indices.tolist(), strict=True):
            poison = self.poisons.get(seed)
            if poison is not None and poison.strikes(self.index, token_index, self.rng):
                self.die(self.timing.restart, noticed=poison.noticed, status=poison.status)
                return True
        return False

    def stop(self, seconds: float) -> None:
        """Stop the process as by SIGSTOP; its events wait until it continues."""
        if self.alive:
            self.states.append(ProcessState(None, was_stopped=True))
        self._stopped = True
        self._n_stops += 1
        stop, life = self._n_stops, self.n_processes

        def go_on() -> None:
            if (stop, life) == (self._n_stops, self.n_processes):
                self._stopped = False
                backlog, self._backlog = self._backlog, []
                for action in backlog:
                    self._do(action)

        if seconds < math.inf:
            self.clock.call_at(self.clock.now() + seconds, go_on)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Run `action` after `seconds`, unless the process has died by that time."""
        life = self.n_processes
        self.clock.call_at(self.clock.now() + seconds, lambda: self._do(action, life))

    def take(self, data: bytes) -> None:
        """Handle a frame; a dead process ignores it."""
        self._do(lambda: self.controller.take(data))

    def send_hidden(self, epoch: int, iteration: int, hidden: list[int]) -> None:
        """Send hidden states over the link, to the process that the next stage has when they arrive."""
        following = self.next
        assert following is not None
        at = self.clock.now() + self.timing.link
        self.clock.call_at(
            at, lambda: following._do(lambda: following.device.hidden_arrived(epoch, iteration, hidden))
        )

    def lie(self, which: int) -> None:
        """Send a well-formed but false frame."""
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
        """As in Lines."""
        self._next_address = address

    def forward(self, data: bytes) -> None:
        """As in Lines."""
        assert self._next_address is not None, "`connect` comes first"
        self._lines.to_address(self.index + 1, self._next_address, data)

    def report(self, data: bytes) -> None:
        """As in Lines."""
        self._lines.to_master(self.index, data)

    def _do(self, action: Callable[[], object], life: int | None = None) -> None:
        if not self.alive or (life is not None and life != self.n_processes):
            return
        if self._stopped:
            self._backlog.append(action)
            return
        action()
        # Schedule a check at the worker's deadline: a process past it exits.
        deadline = self.controller.deadline()
        if self.alive and deadline < self._check_at:
            self._check_at = deadline
            self.later(max(0.0, deadline - self.clock.now()), self._check)

    def _check(self) -> None:
        self._check_at = math.inf
        if self.controller.overdue() is not None:
            self.die(self.timing.restart, noticed=True, status=1)
