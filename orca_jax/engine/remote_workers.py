"""The engine master's side of worker processes: sends iterations, receives tokens and detects losses.

ORCA 4.1, Figure 7, extended with faults, which the paper leaves out. Every frame from a worker is checked
against what was sent to it. Any loss ends the epoch: all stages abandon it and begin a new one with new
caches.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, NoReturn, Protocol

import numpy as np

from orca_jax.config import Deadlines
from orca_jax.control.frame import (
    DONE,
    MAX_EPOCH,
    MESSAGE,
    PASSED,
    READY,
    RECEIVED,
    START,
    TOKENS,
    TROUBLE,
    WORDS,
    Frame,
    decode_frame,
    decode_stage_time,
    encode_frame,
)
from orca_jax.control.message_wire import encode_message
from orca_jax.control.sampled_wire import (
    ExpectedRecords,
    decode_routed,
    decode_sampled,
    expected_records,
    join_stages,
)
from orca_jax.control.start_order import StartOrder, encode_start
from orca_jax.control.worker_pb2 import Tokens
from orca_jax.engine.engine_master import LOOK_SECONDS, EngineMaster
from orca_jax.engine.stage_counters import RemoteCounters, StageCounters
from orca_jax.errors import BadFrame, EngineError, LossCause, WorkerLost
from orca_jax.iteration.message import ControlMessage, MakeWords
from orca_jax.iteration.shape import EngineShape
from orca_jax.request.routed_experts import ExpertIds
from orca_jax.request.sampled import Sampled
from orca_jax.scheduling.kv_manager import KVManager

# A stage that notices a neighbour's death reports trouble within 40 ms, perhaps before the neighbour's line
# is seen to break.
_NEIGHBOUR_SECONDS = 0.25


class Arrival(NamedTuple):
    """A frame's bytes from a stage's line, or None with the reason why the line broke."""

    stage: int
    data: bytes | None
    why: str = ""


class Channel(Protocol):
    """The engine master's lines, one to each worker; they may lose, duplicate, delay and corrupt frames."""

    def follow(self) -> Sequence[str]:
        """Each stage's worker's control address now; the line to one that has moved joins it there."""
        ...

    def send(self, stage: int, data: bytes) -> None:
        """Send a frame without blocking; drops it if the line is broken, which is also an arrival."""
        ...

    def receive(self, timeout: float) -> Arrival | None:
        """Return the next arrival from any line, or None after `timeout` seconds."""
        ...

    def close(self) -> None:
        """Close all lines."""
        ...


class RemoteTokens:
    """PendingTokens of an iteration on remote workers; `number` counts the iterations of its epoch.

    `is_ready` and `fetch` raise WorkerLost.
    """

    def __init__(
        self,
        workers: "RemoteWorkers",
        number: int,
        expected: ExpectedRecords,
        *,
        sent: float,
        words: MakeWords | None,
        shape: EngineShape,
    ) -> None:
        self.number = number
        self.expected = expected
        self.sent = sent
        self.words = words  # None if not needed or already sent
        self.payload: Tokens | None = None  # as received
        self.sampled: Sampled | None = None  # decoded from `payload`, with the experts of all stages
        self._tokens: Sampled | None = None  # without experts
        self._routed = dict[int, dict[int, ExpertIds]]()  # by stage
        self._shape = shape
        self._workers = workers

    def take(self, payload: Tokens, sampled: Sampled) -> None:
        """Take what the last stage sampled; `take_routed` follows."""
        self.payload, self._tokens = payload, sampled

    def take_routed(self, stage: int, data: bytes) -> None:
        """Take the experts that a stage reports at its end of the iteration. Raises BadFrame."""
        rows, routing = self.expected.routed, self._shape.routing
        if not rows:
            if data:
                raise BadFrame(f"it reports experts in iteration {self.number}, whose rows ask for none")
            self.sampled = self._tokens
            return
        self._routed[stage] = decode_routed(data, rows, routing)
        if len(self._routed) == self._workers.n_stages and self._tokens is not None:
            stages = [self._routed[i] for i in sorted(self._routed)]
            self.sampled = replace(self._tokens, routed=join_stages(stages, rows, routing))

    def is_ready(self) -> bool:
        """Whether the tokens are here; handles all arrivals and checks the deadline."""
        if self.sampled is None:
            self._workers.look()
        return self.sampled is not None

    def wait(self, seconds: float) -> None:
        """Wait for an arrival, at most `seconds`, and handle it. Raises WorkerLost."""
        self._workers.wait(seconds)

    def fetch(self) -> Sampled:
        """Wait for the tokens, at most until the deadline."""
        while not self.is_ready():
            self._workers.wait()
        assert self.sampled is not None
        return self.sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class Supervision:
    """Callbacks to whoever restarts the workers. Only `cause_of` may block, for seconds.

    `on_suspect` is called with each stage whose worker may not come back by itself: it missed a deadline,
    sent a malformed frame, its line broke, or it has no new caches within `worker_seconds` (a process that is
    still starting has none either). `on_ready` is called with each stage that is ready for a new epoch.
    `failure` returns the error to raise when the workers will never come up again. `cause_of` returns the
    cause of a loss, given the stage where it was noticed and the cause that the workers' frames suggest.
    """

    on_suspect: Callable[[int], None] = lambda stage: None
    on_ready: Callable[[int], None] = lambda stage: None
    failure: Callable[[], EngineError | None] = lambda: None
    cause_of: Callable[[int, LossCause], LossCause] = lambda stage, seen: seen


@dataclass(slots=True)
class _StartAttempt:
    """An attempt to start an epoch on all workers: its deadlines, and the stages that are ready.

    Times are on the master's clock. Each move of a worker puts the deadline off, never beyond `latest`.
    """

    deadline: float
    latest: float
    ask_at: float
    suspect_at: float  # when to report the stages that are not ready as suspects
    ready: set[int] = field(default_factory=set[int])
    addresses: tuple[str, ...] = ()  # of the workers that were last asked; none: nobody was


class RemoteWorkers:
    """All stages of a pipeline, as the engine master sees them. For use by one thread.

    `orders[i]` is stage i's order at the start of an epoch; its `next_address` comes from the channel, since
    a worker may be somewhere else when it comes back. `first_epoch` should be above every epoch that
    these workers know from an earlier master; the current time serves. If a clock was set back, a worker
    reports the epoch it knows, and the master begins a later one. `issue` raises WorkerLost until `recover`
    has started an epoch.
    """

    def __init__(
        self,
        channel: Channel,
        orders: Sequence[StartOrder],
        *,
        clock: Callable[[], float],
        deadlines: Deadlines,
        first_epoch: int = 1,
        supervision: Supervision | None = None,
    ) -> None:
        n_stages = len(orders)
        assert n_stages >= 1 and first_epoch >= 1
        self.counters = RemoteCounters()
        self.stages = [StageCounters() for _ in orders]
        self.epoch = first_epoch - 1
        self._channel = channel
        self._shape = orders[0].shape
        assert all(order.shape == self._shape for order in orders), "one engine has one shape"
        self.orders = tuple(orders)
        self._moves_weights = False  # until the orders' first epoch has begun
        self.n_stages = n_stages
        self._clock = clock
        self._deadlines = deadlines
        self._supervision = supervision or Supervision()
        self._attempt: _StartAttempt | None = None
        self._refusals: dict[int, str] = {}  # why the last line to a stage that is not ready ended
        self._lost: WorkerLost | None = WorkerLost(0, "the workers are not up yet")
        self._unanswered: deque[RemoteTokens] = deque()  # issued; begins with an iteration without tokens
        self._n_issued = 0  # in this epoch
        self._put: dict[int, int] = {}  # slot to version: adapters that the next iteration writes into slots
        self._moved = 0.0  # when the oldest iteration in flight became the oldest
        self._received = [-1] * n_stages  # each stage's newest iteration reported as received
        self._done = [-1] * n_stages  # and as done

    def issue(self, message: ControlMessage, words: MakeWords) -> RemoteTokens:
        """Send an iteration to worker 1, and the token masks of its constrained rows directly to worker n.

        The masks follow as soon as they are known. Raises as `look` does.
        """
        self.look()
        if self._put:
            put = np.array([(version, slot) for slot, version in self._put.items()], np.int32)
            message = replace(message, put_adapters=put)
            self._put.clear()
        payload = encode_message(message, self._shape)
        now = self._clock()
        needs_words = bool(message.constrained.any())
        expected = expected_records(message)
        tokens = RemoteTokens(
            self, self._n_issued, expected, sent=now, words=words if needs_words else None, shape=self._shape
        )
        if not self._unanswered:
            self._moved = now
        self._unanswered.append(tokens)
        self._n_issued += 1
        self.counters.messages += 1
        data = encode_frame(Frame(MESSAGE, self.epoch, tokens.number, 0, payload))
        self.counters.message_bytes += len(data)
        self._channel.send(0, data)
        if needs_words:
            self._send_words()
        return tokens

    def put_adapter(self, version: int, slot: int) -> None:
        """Let the next iteration begin by writing an adapter, which all workers have, into a slot."""
        self._put[slot] = version

    def look(self) -> None:
        """Handle all arrivals without blocking.

        Raises the error that `failure` returns, or WorkerLost; the latter at every call until `recover`.
        """
        self._raise_failure()
        if self._lost is not None:
            raise self._lost
        self._send_words()
        while (arrival := self._channel.receive(0.0)) is not None:
            self._take(arrival)
            self._raise_failure()
        if self._unanswered and self._clock() >= self._due():
            stage, why = self._late_stage()
            self._lose(stage, why, suspects=(stage,))

    def _send_words(self) -> None:
        """Send the token masks that are known, in the order of iterations."""
        for tokens in self._unanswered:
            if tokens.words is None:
                continue
            words = tokens.words()
            if words is None:
                return
            tokens.words = None
            bits = words.astype("<i4", copy=False).tobytes()
            self.counters.word_bytes += len(bits)
            frame = Frame(WORDS, self.epoch, tokens.number, 0, bits)
            self._channel.send(self.n_stages - 1, encode_frame(frame))

    def wait(self, seconds: float | None = None) -> None:
        """Wait for an arrival, at most `seconds`, and handle it. Raises WorkerLost."""
        if self._lost is not None:
            raise self._lost
        limit = self._deadlines.look_seconds if seconds is None else seconds
        if self._unanswered:
            limit = min(limit, max(0.0, self._due() - self._clock()))
        arrival = self._channel.receive(limit)
        if arrival is not None:
            self._take(arrival)

    def recover(self, interrupted: Callable[[], bool]) -> bool:
        """Start a new epoch, in which every stage has new caches; return False if interrupted.

        After an interruption the next call continues with the same epoch. Raises WorkerLost if a stage is not
        ready within `ready_seconds`, counted from the last move of a worker and at most twice as long in all,
        or is lost again; the next call then begins another epoch. Raises the error that `failure` returns.
        """
        attempt = self._attempt or self._begin()
        while len(attempt.ready) < self.n_stages:
            self._raise_failure()
            now = self._clock()
            if now >= attempt.deadline:
                missing = sorted(set(range(self.n_stages)) - attempt.ready)
                names = ", ".join(f"stage {stage + 1}" for stage in missing[1:])
                also = f"; also not ready: {names}" if names else ""
                refusal = self._refusals.get(missing[0])
                because = f" ({refusal})" if refusal else ""
                why = f"was not ready within {self._deadlines.ready_seconds:g} seconds{because}{also}"
                self._lose(missing[0], why, suspects=missing)
            if interrupted():
                return False
            if now >= attempt.suspect_at:
                attempt.suspect_at = math.inf
                for stage in sorted(set(range(self.n_stages)) - attempt.ready):
                    self._supervision.on_suspect(stage)
            if now >= attempt.ask_at:
                attempt.ask_at = now + self._deadlines.retry_seconds
                self._follow(attempt)
                for stage, order in enumerate(self.orders):
                    if stage not in attempt.ready:
                        frame = Frame(START, self.epoch, payload=encode_start(order))
                        self._channel.send(stage, encode_frame(frame))
            next_at = min(attempt.deadline, attempt.ask_at, attempt.suspect_at)
            limit = min(self._deadlines.look_seconds, next_at - now)
            arrival = self._channel.receive(max(0.0, limit))
            if arrival is not None:
                self._take(arrival)
        self._attempt = None
        self._lost = None
        self._moves_weights = False
        return True

    def change_orders(self, orders: Sequence[StartOrder]) -> None:
        """Begin the next epoch with these orders, while no iteration is in flight; `recover` must follow."""
        assert not self._unanswered and [order.shape for order in orders] == [self._shape] * self.n_stages
        self.orders = tuple(orders)
        self._moves_weights = True
        self._attempt = None
        self._lost = WorkerLost(0, "the workers begin again with other weights, or go to sleep or wake up")

    def close(self) -> None:
        self._channel.close()

    def _begin(self) -> _StartAttempt:
        while (arrival := self._channel.receive(0.0)) is not None:
            if arrival.data is None:  # a broken line is reported only once
                self._supervision.on_suspect(arrival.stage)
            # All other arrivals are stale: they were sent before the new epoch.
        self.epoch += 1
        self._unanswered.clear()
        self._put.clear()
        self._n_issued = 0
        self._received = [-1] * self.n_stages
        self._done = [-1] * self.n_stages
        for counters in self.stages:
            counters.received_at.clear()
        now, ready_seconds = self._clock(), self._deadlines.ready_seconds
        patience = ready_seconds if self._moves_weights else self._deadlines.worker_seconds
        self._attempt = _StartAttempt(
            deadline=now + ready_seconds,
            latest=now + 2 * ready_seconds,
            ask_at=now,
            suspect_at=now + patience,
        )
        return self._attempt

    def _follow(self, attempt: _StartAttempt) -> None:
        """Give each stage's order the present address of the next stage.

        A worker takes one order in an epoch, so if an address changes all workers begin another epoch.
        """
        addresses = tuple(self._channel.follow())
        if addresses == attempt.addresses:
            return
        if attempt.addresses:
            self.epoch += 1
            attempt.ready.clear()
            attempt.deadline = min(self._clock() + self._deadlines.ready_seconds, attempt.latest)
        attempt.addresses = addresses
        following = (*addresses[1:], "")
        self.orders = tuple(
            replace(order, next_address=address)
            for order, address in zip(self.orders, following, strict=True)
        )

    def _due(self) -> float:
        return max(self._unanswered[0].sent, self._moved) + self._deadlines.iteration_seconds

    def _raise_failure(self) -> None:
        failure = self._supervision.failure()
        if failure is not None:
            raise failure

    def _lose(
        self,
        stage: int,
        why: str,
        *,
        suspects: Sequence[int] = (),
        seen: LossCause = LossCause.FAULT,
    ) -> NoReturn:
        """End the epoch; `seen` is its cause as far as it shows in what the workers sent."""
        # While the workers come up nothing is in flight, and the cause concerns nobody. The supervisor is
        # asked before it kills a suspect, which ends by another signal then.
        origin = suspects[0] if suspects else stage
        cause = seen if self._attempt is not None else self._supervision.cause_of(origin, seen)
        self._attempt = None
        self._unanswered.clear()
        self._lost = WorkerLost(stage, why, cause)
        for suspect in suspects:
            self._supervision.on_suspect(suspect)
        raise self._lost

    def _late_stage(self) -> tuple[int, str]:
        """The first stage that has not taken the oldest iteration, or else not finished it, and a message."""
        iteration = self._unanswered[0].number
        late = f"within {self._deadlines.iteration_seconds:g} seconds (epoch {self.epoch})"
        for stage, received in enumerate(self._received):
            if received < iteration:
                return stage, f"did not take iteration {iteration} {late}"
        for stage, done in enumerate(self._done):
            if done < iteration:
                return stage, f"did not finish iteration {iteration} {late}"
        return self.n_stages - 1, f"did not return the tokens of iteration {iteration} {late}"

    def _take(self, arrival: Arrival) -> None:
        stage = arrival.stage
        assert 0 <= stage < self.n_stages
        if arrival.data is None:
            if self._attempt is None or stage in self._attempt.ready:
                why = f"its line broke: {arrival.why}"
                self._lose(stage, why, suspects=(stage,), seen=LossCause.UNKNOWN)
            # A stage that is not ready is asked again until the deadline; but its process may hang.
            self._refusals[stage] = arrival.why
            self._supervision.on_suspect(stage)
            return
        try:
            frame = decode_frame(arrival.data)
            if frame.stage != stage:
                raise BadFrame(f"it claims to be stage {frame.stage + 1}")
            if frame.epoch < self.epoch:
                self.counters.stale += 1
                return
            self._take_current(frame)
        except BadFrame as error:
            self.counters.malformed += 1
            self._lose(stage, f"sent a malformed frame: {error}", suspects=(stage,))

    def _take_current(self, frame: Frame) -> None:
        """Handle a frame that is not stale.

        Raises BadFrame if no worker of this epoch may send it, and WorkerLost if the worker reports trouble.
        """
        kind, stage = frame.kind, frame.stage
        if kind is PASSED:
            self._take_passed(frame.epoch)
        elif frame.epoch > self.epoch:
            raise BadFrame(f"it refers to epoch {frame.epoch}, but the current epoch is {self.epoch}")
        elif kind is TROUBLE:
            self._take_trouble(stage, frame.payload[:1000])
        elif kind is READY:
            ready = None if self._attempt is None else self._attempt.ready
            if ready is None or stage in ready:
                self.counters.duplicates += 1
            else:
                ready.add(stage)
                self._refusals.pop(stage, None)
                self._supervision.on_ready(stage)
        elif kind in (RECEIVED, DONE, TOKENS):
            if frame.iteration >= self._n_issued:
                raise BadFrame(f"it refers to iteration {frame.iteration}, which was not issued")
            if kind is TOKENS:
                self._take_tokens(frame)
            else:
                self._take_time(frame)
        else:
            raise BadFrame(f"it sent {kind.name}, which only an engine master sends")

    def _take_trouble(self, stage: int, why: str) -> NoReturn:
        """End the epoch in which a worker reports trouble, if only because a neighbour died a moment ago."""
        end = self._clock() + _NEIGHBOUR_SECONDS
        while self.n_stages > 1 and self._attempt is None and (left := end - self._clock()) > 0:
            arrival = self._channel.receive(left)
            # Frames of this epoch no longer matter.
            if arrival is not None and arrival.data is None:
                seen = LossCause.FAULT if arrival.stage == stage else LossCause.UNKNOWN
                self._lose(stage, why, suspects=(arrival.stage,), seen=seen)
        # Not a suspect: it reports the trouble itself and waits for the next epoch.
        self._lose(stage, why)

    def _take_passed(self, epoch: int) -> None:
        """Continue above `epoch`, which a worker already knows."""
        if epoch >= MAX_EPOCH:
            raise BadFrame(f"it refers to epoch {epoch}; epochs are below {MAX_EPOCH}")
        if epoch == self.epoch:  # an old START reached it late
            self.counters.duplicates += 1
            return
        if self._attempt is None:
            raise BadFrame(f"it refers to epoch {epoch}, but the current epoch is {self.epoch}")
        self.epoch = epoch + 1
        self._attempt.ready.clear()
        self._attempt.ask_at = self._clock()

    def _take_time(self, frame: Frame) -> None:
        stage, iteration = frame.stage, frame.iteration
        seconds, link_bytes, routed = decode_stage_time(frame.payload)
        newest = self._received if frame.kind is RECEIVED else self._done
        if iteration <= newest[stage]:
            self.counters.duplicates += 1
            return
        newest[stage] = iteration
        counters = self.stages[stage]
        if frame.kind is RECEIVED:
            counters.note_received(iteration, seconds)
            return
        counters.done += 1
        counters.link_bytes += link_bytes
        if stage != self.n_stages - 1:
            counters.note_times(self.epoch, iteration, stage, done=seconds)
            if self._unanswered and iteration >= self._unanswered[0].number:
                self._unanswered[iteration - self._unanswered[0].number].take_routed(stage, routed)
                self._advance()

    def _take_tokens(self, frame: Frame) -> None:
        if frame.stage != self.n_stages - 1:
            raise BadFrame("it sent tokens, which only the last stage may send")
        oldest = self._unanswered[0].number if self._unanswered else self._n_issued
        if frame.iteration < oldest:
            self.counters.duplicates += 1
            return
        tokens = self._unanswered[frame.iteration - oldest]
        shape = self._shape
        sampled = decode_sampled(
            frame.payload,
            tokens.expected,
            vocab_size=shape.vocab_size,
            embedding_size=shape.embedding_size,
        )
        if tokens.payload is not None:
            if tokens.payload != frame.payload:
                raise BadFrame(f"it returned iteration {frame.iteration} twice, with different tokens")
            self.counters.duplicates += 1
            return
        tokens.take(frame.payload, sampled)
        self.stages[frame.stage].note_times(self.epoch, frame.iteration, frame.stage, done=math.nan)
        tokens.take_routed(frame.stage, frame.payload.routed)
        self._advance()

    def _advance(self) -> None:
        """Forget the iterations, in order, whose results are here."""
        # Tokens that came out of order stay until those of all earlier iterations are here.
        while self._unanswered and self._unanswered[0].sampled is not None:
            self._unanswered.popleft()
            self._moved = self._clock()


class RemoteEngine(EngineMaster):
    """An engine master whose workers may be lost: a `recovery.RecoverableEngine`.

    Call `recover` before the first iteration and after a WorkerLost.
    """

    def __init__(
        self,
        workers: RemoteWorkers,
        kv: KVManager,
        *,
        vocab_size: int,
        n_workers: int,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        super().__init__(
            workers,
            kv,
            vocab_size=vocab_size,
            n_workers=n_workers,
            keeps_tokens=n_workers == 1,  # otherwise worker n has them, and the host passes them to worker 1
            look_seconds=look_seconds,
        )
        self.workers = workers

    def look(self) -> None:
        """Check for lost workers without blocking. Raises WorkerLost, or EngineError if the loss is final."""
        self.workers.look()

    def recover(self, interrupted: Callable[[], bool]) -> bool:
        """Bring the workers up again with new caches; return False if interrupted.

        Raises WorkerLost, or EngineError if the workers will never come up again.
        """
        return self.workers.recover(interrupted)
