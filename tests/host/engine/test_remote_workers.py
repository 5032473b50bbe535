"""The engine master's side of the workers, with a channel whose other end is the test."""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from orca_jax.config import Deadlines, RestartBound
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
from orca_jax.control.start_order import StartOrder, decode_start
from orca_jax.control.worker_pb2 import Tokens
from orca_jax.engine.engine_master import PendingTokens, Workers
from orca_jax.engine.remote_workers import Arrival, RemoteEngine, RemoteTokens, RemoteWorkers, Supervision
from orca_jax.engine.stage_counters import IterationTimes
from orca_jax.errors import ConfigError, EngineError, LossCause, WorkerLost
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.recovery import RecoverableEngine
from tests.host.control.test_message_wire import ONE, SHAPE, message_of

DEADLINES = Deadlines(
    iteration_seconds=2, worker_seconds=4, ready_seconds=10, retry_seconds=1, look_seconds=0.5
)
MESSAGE_OF_TWO = message_of([ONE, ONE])


def no_words() -> np.ndarray:
    raise AssertionError("no row is constrained")


def tokens_of(*token_ids: int) -> Tokens:
    return Tokens(token_ids=np.array(token_ids, "<i4").tobytes())


ORDERS = [
    StartOrder(shape=SHAPE, next_address=address, worker_seconds=4.0, ready_seconds=10.0)
    for address in ("two:2", "three:3", "")
]


class Bench:
    """`RemoteWorkers` of three stages and the channel to them; a wait without an arrival passes the time."""

    def __init__(self, first_epoch: int = 1, orders: list[StartOrder] = ORDERS) -> None:
        self.now = 100.0
        self.sent: list[tuple[int, Frame]] = []
        self.arrivals: deque[Arrival] = deque()
        self.on_send: Callable[[int, Frame], None] = lambda stage, frame: None
        self.closed = False
        self.addresses = ["one:1", "two:2", "three:3"]
        self.suspects: list[int] = []
        self.ready: list[int] = []
        self.failure: EngineError | None = None
        self.cause: LossCause | None = None  # the supervisor's answer; None: as the master saw it
        self.asked_for_cause: list[tuple[int, LossCause]] = []
        self.workers = RemoteWorkers(
            self,
            orders=orders,
            clock=lambda: self.now,
            deadlines=DEADLINES,
            first_epoch=first_epoch,
            supervision=Supervision(
                on_suspect=self.suspects.append,
                on_ready=self.ready.append,
                failure=lambda: self.failure,
                cause_of=self.cause_of,
            ),
        )

    def cause_of(self, stage: int, seen: LossCause) -> LossCause:
        assert not self.suspects, "suspects are killed only afterwards"
        self.asked_for_cause.append((stage, seen))
        return self.cause or seen

    # Channel

    def follow(self) -> list[str]:
        return self.addresses

    def send(self, stage: int, data: bytes) -> None:
        frame = decode_frame(data)
        self.sent.append((stage, frame))
        self.on_send(stage, frame)

    def receive(self, timeout: float) -> Arrival | None:
        assert 0 <= timeout <= DEADLINES.look_seconds
        if self.arrivals:
            return self.arrivals.popleft()
        self.now += timeout
        return None

    def close(self) -> None:
        self.closed = True

    # What the tests say

    def say(
        self, stage: int, kind: FrameKind, iteration: int = 0, payload: Any = None, epoch: int | None = None
    ) -> None:
        epoch = self.workers.epoch if epoch is None else epoch
        self.arrivals.append(Arrival(stage, encode_frame(Frame(kind, epoch, iteration, stage, payload))))

    def time(
        self, stage: int, kind: FrameKind, iteration: int, seconds: float = 1.0, link_bytes: int = 0
    ) -> None:
        self.say(stage, kind, iteration, encode_stage_time(StageTime(seconds, link_bytes)))

    def tokens(self, iteration: int, *token_ids: int, stage: int = 2, epoch: int | None = None) -> None:
        self.say(stage, TOKENS, iteration, tokens_of(*token_ids), epoch)

    def all_answer(self) -> None:
        """Let every stage be ready as soon as it is asked."""

        def ready(stage: int, frame: Frame) -> None:
            if frame.kind is START:
                self.say(stage, READY)

        self.on_send = ready

    def up(self) -> "Bench":
        self.all_answer()
        assert self.workers.recover(lambda: False) is True
        self.on_send = lambda stage, frame: None
        self.sent.clear()
        self.ready.clear()
        return self

    def lost(self) -> WorkerLost:
        """Handle all arrivals; return the error that this raises."""
        with pytest.raises(WorkerLost) as caught:
            self.workers.look()
        return caught.value


def test_an_iteration_goes_to_worker_1_alone_and_its_tokens_come_back():
    bench = Bench().up()
    pending = bench.workers.issue(MESSAGE_OF_TWO, no_words)
    ((stage, frame),) = bench.sent
    assert (stage, frame.kind, frame.epoch, frame.iteration) == (0, MESSAGE, 1, 0)
    assert decode_message(frame.payload, SHAPE).row.tolist() == [3, 3]
    assert not pending.is_ready()
    bench.tokens(0, 7, 8)
    assert pending.is_ready() and pending.is_ready()
    assert pending.fetch().token_ids.tolist() == [7, 8]
    counters = bench.workers.counters
    assert (counters.messages, counters.message_bytes) == (1, len(encode_frame(frame)))


def test_it_fits_where_a_local_worker_does():
    workers: Workers = Bench().up().workers
    pending: PendingTokens = workers.issue(MESSAGE_OF_TWO, no_words)
    assert isinstance(pending, RemoteTokens)


def test_tokens_wait_for_those_before_them():
    bench = Bench().up()
    first, second, third = (bench.workers.issue(MESSAGE_OF_TWO, no_words) for _ in range(3))
    bench.tokens(1, 3, 4)
    assert not first.is_ready() and second.is_ready()
    bench.tokens(0, 1, 2)
    bench.tokens(2, 5, 6)
    assert [p.fetch().token_ids.tolist() for p in (first, second, third)] == [[1, 2], [3, 4], [5, 6]]


def test_token_masks_go_straight_to_the_last_worker():
    bench = Bench().up()
    message = message_of([ONE, {**ONE, "flags": 2}, {**ONE, "flags": 3}])
    bench.workers.issue(message, lambda: np.array([[1, 2], [3, -4]], np.int32))
    (_, first), (stage, words) = bench.sent
    assert first.kind is MESSAGE and decode_message(first.payload, SHAPE).constrained.tolist() == [
        False,
        True,
        True,
    ]
    assert (stage, words.kind, words.epoch, words.iteration) == (2, WORDS, 1, 0)
    assert np.frombuffer(words.payload, "<i4").tolist() == [1, 2, 3, -4]
    assert bench.workers.counters.word_bytes == 16


def test_late_masks_are_sent_in_the_order_of_iterations():
    bench = Bench().up()
    known: set[int] = set()

    def words_of(n: int) -> np.ndarray | None:
        return np.array([[n, n]], np.int32) if n in known else None

    message = message_of([{**ONE, "flags": 2}])
    pending = [bench.workers.issue(message, partial(words_of, n)) for n in range(3)]
    known |= {1, 2}
    bench.workers.look()
    assert [frame.kind for _, frame in bench.sent] == [MESSAGE] * 3, "what the first allows is not known"
    known.add(0)
    assert not pending[2].is_ready()
    assert [frame.iteration for _, frame in bench.sent[3:]] == [0, 1, 2]
    assert {(stage, frame.kind) for stage, frame in bench.sent[3:]} == {(2, WORDS)}
    bench.workers.look()
    assert len(bench.sent) == 6


def test_tokens_that_come_twice_count_once():
    bench = Bench().up()
    first, second = (
        bench.workers.issue(MESSAGE_OF_TWO, no_words),
        bench.workers.issue(MESSAGE_OF_TWO, no_words),
    )
    bench.tokens(1, 3, 4)
    bench.tokens(1, 3, 4)
    bench.tokens(0, 1, 2)
    bench.tokens(0, 9, 9)  # it has been read: what it says now is not looked at
    assert first.is_ready() and second.is_ready()
    assert bench.workers.counters.duplicates == 2
    assert [p.fetch().token_ids.tolist() for p in (first, second)] == [[1, 2], [3, 4]]


def test_messages_of_an_old_epoch_are_dropped():
    bench = Bench().up()
    bench.workers.issue(MESSAGE_OF_TWO, no_words)
    bench.say(1, TROUBLE, payload="lost")
    assert bench.lost().stage == 1
    bench.up()
    pending = bench.workers.issue(MESSAGE_OF_TWO, no_words)
    assert bench.sent[-1][1][:3] == (MESSAGE, 2, 0)
    bench.tokens(0, 6, 6, epoch=1)
    bench.say(1, TROUBLE, payload="late", epoch=1)
    bench.say(0, READY, epoch=1)
    bench.tokens(0, 299, 300, 301, epoch=1)
    assert not pending.is_ready()
    assert bench.workers.counters.stale == 4
    bench.tokens(0, 7, 8)
    assert pending.fetch().token_ids.tolist() == [7, 8]


def bytes_of(kind: FrameKind, iteration: int = 0, payload: Any = None, *, epoch: int = 1, stage: int = 2):
    return encode_frame(Frame(kind, epoch, iteration, stage, payload))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "not a frame of orca_jax"),
        (b"HTTP/1.1 400 Bad Request, and something more", "not a frame of orca_jax"),
        (bytes_of(TOKENS, 0, tokens_of(1, 2))[:-1] + b"9", "corrupt"),
        (bytes_of(DONE, stage=1), "claims to be stage 2"),
        (bytes_of(READY, epoch=2), "refers to epoch 2, but the current epoch is 1"),
        (bytes_of(TOKENS, 0, tokens_of(1)), "the tokens of 2 requests have 4 bytes; they need 8"),
        (bytes_of(TOKENS, 0, tokens_of(1, 300)), "token id 300"),
        (bytes_of(TOKENS, 0, tokens_of(-1, 1)), "token id -1"),
        (bytes_of(TOKENS, 1, tokens_of(1, 2)), "iteration 1, which was not issued"),
        (bytes_of(DONE, 1), "iteration 1, which was not issued"),
        (bytes_of(RECEIVED, 99), "iteration 99, which was not issued"),
        (bytes_of(START), "START, which only an engine master sends"),
        (bytes_of(MESSAGE), "MESSAGE, which only"),
        (bytes_of(RECEIVED), "a stage time has no seconds"),
        (bytes_of(DONE), "a stage time has no seconds"),
        (bytes_of(RECEIVED, 0, encode_stage_time(StageTime(math.nan, 0))), "nan seconds"),
        (bytes_of(DONE, 0, encode_stage_time(StageTime(-1.0, 0))), "-1.0 seconds"),
    ],
)
def test_a_worker_that_sends_a_malformed_frame_is_lost(data: bytes, complaint: str):
    bench = Bench().up()
    bench.workers.issue(MESSAGE_OF_TWO, no_words)
    bench.arrivals.append(Arrival(2, data))
    lost = bench.lost()
    assert lost.stage == 2
    assert str(lost).startswith("stage 3: sent a malformed frame: ")
    assert complaint in str(lost)
    assert bench.workers.counters.malformed == 1
    assert bench.suspects == [2]
    assert (bench.workers.stages[2].received, bench.workers.stages[2].done) == (0, 0)


def test_only_the_last_stage_has_tokens():
    bench = Bench().up()
    bench.workers.issue(MESSAGE_OF_TWO, no_words)
    bench.tokens(0, 7, 8, stage=1)
    assert "stage 2: sent a malformed frame: it sent tokens" in str(bench.lost())


def test_two_answers_that_differ_cannot_both_be_right():
    bench = Bench().up()
    for _ in range(2):
        bench.workers.issue(MESSAGE_OF_TWO, no_words)
    bench.tokens(1, 3, 4)
    bench.tokens(1, 3, 5)
    assert "returned iteration 1 twice, with different tokens" in str(bench.lost())


def test_a_worker_s_identity_is_passed_on():
    bench = Bench().up()
    bench.say(1, TROUBLE, payload="out of memory \u00ff" + "x" * 5000)
    lost = bench.lost()
    assert str(lost).startswith("stage 2: out of memory \u00ffxxx") and len(str(lost)) < 1100
    assert bench.suspects == [], "it says so itself"


def test_trouble_next_to_a_broken_line_is_blamed_on_the_neighbour():
    bench = Bench().up()
    bench.workers.issue(MESSAGE_OF_TWO, no_words)
    bench.say(1, TROUBLE, payload="connection closed")
    bench.time(2, RECEIVED, 0)
    bench.arrivals.append(Arrival(0, None, "connection reset"))
    lost = bench.lost()
    assert (str(lost), lost.cause) == ("stage 2: connection closed", LossCause.UNKNOWN)
    assert bench.suspects == [0], "a broken line is reported only once"
    assert bench.asked_for_cause == [(0, LossCause.UNKNOWN)]


def test_trouble_before_the_end_of_the_same_worker_is_its_own():
    bench = Bench().up()
    bench.say(1, TROUBLE, payload="the device hangs")
    bench.arrivals.append(Arrival(1, None, "closed"))
    assert bench.lost().cause is LossCause.FAULT
    assert bench.suspects == [1]


def test_the_cause_of_a_loss_is_the_supervisor_s_to_say():
    bench = Bench().up()
    bench.cause = LossCause.OUTSIDE
    for seen, arrive in (
        (LossCause.UNKNOWN, lambda: bench.arrivals.append(Arrival(0, None, "closed"))),
        (LossCause.FAULT, lambda: bench.say(0, TROUBLE, payload="out of memory")),
        (LossCause.FAULT, lambda: bench.arrivals.append(Arrival(0, b"nonsense"))),
        (LossCause.FAULT, lambda: None),
    ):
        bench.workers.issue(MESSAGE_OF_TWO, no_words)
        arrive()
        if not bench.arrivals:
            bench.now += DEADLINES.iteration_seconds
        assert bench.lost().cause is LossCause.OUTSIDE
        assert bench.asked_for_cause.pop() == (0, seen)
        bench.suspects.clear()
        bench.up()


def test_a_broken_line_is_a_loss_even_when_nothing_runs():
    bench = Bench().up()
    bench.arrivals.append(Arrival(0, None, "connection reset"))
    assert str(bench.lost()) == "stage 1: its line broke: connection reset"
    bench.lost()
    assert bench.suspects == [0], "once"


def test_after_a_loss_everything_raises_until_it_is_recovered_from():
    bench = Bench()
    for attempt in range(2):
        for call in (
            bench.workers.look,
            bench.workers.wait,
            lambda: bench.workers.issue(MESSAGE_OF_TWO, no_words),
        ):
            with pytest.raises(WorkerLost, match="are not up yet" if attempt == 0 else "line broke"):
                call()
        assert bench.sent == []
        bench.up()
        pending = bench.workers.issue(MESSAGE_OF_TWO, no_words)
        bench.sent.clear()
        if attempt == 0:
            bench.arrivals.append(Arrival(0, None, "gone"))
            with pytest.raises(WorkerLost, match="line broke"):
                pending.fetch()


@pytest.mark.parametrize(
    ("received", "done", "stage", "why"),
    [
        ((), (), 0, "did not take iteration 0"),
        ((0,), (), 1, "did not take iteration 0"),
        ((0, 1), (0, 1), 2, "did not take iteration 0"),
        ((0, 1, 2), (), 0, "did not finish iteration 0"),
        ((0, 1, 2), (0,), 1, "did not finish iteration 0"),
        ((0, 1, 2), (0, 1), 2, "did not finish iteration 0"),
        ((0, 1, 2), (0, 1, 2), 2, "did not return the tokens of iteration 0"),
    ],
)
def test_a_missed_deadline_names_the_late_stage(
    received: tuple[int, ...], done: tuple[int, ...], stage: int, why: str
):
    bench = Bench().up()
    pending = bench.workers.issue(MESSAGE_OF_TWO, no_words)
    start = bench.now
    for i in received:
        bench.time(i, RECEIVED, 0)
    for i in done:
        bench.time(i, DONE, 0)
    with pytest.raises(WorkerLost) as caught:
        pending.fetch()
    assert bench.now == start + 2
    assert caught.value.stage == stage
    assert str(caught.value) == f"stage {stage + 1}: {why} within 2 seconds (epoch 1)"
    assert bench.suspects == [stage]


def test_each_iteration_s_deadline_starts_when_its_predecessor_returns():
    bench = Bench().up()
    first, second = (
        bench.workers.issue(MESSAGE_OF_TWO, no_words),
        bench.workers.issue(MESSAGE_OF_TWO, no_words),
    )
    bench.now += 1.5
    bench.tokens(0, 7, 8)
    assert first.is_ready()
    bench.now += 1.9
    assert not second.is_ready()
    bench.now += 0.2
    with pytest.raises(WorkerLost, match="iteration 1"):
        second.is_ready()


def test_an_engine_that_was_idle_for_long_is_not_late():
    bench = Bench().up()
    bench.workers.issue(MESSAGE_OF_TWO, no_words)
    bench.tokens(0, 7, 8)
    bench.workers.look()
    bench.now += 1000
    bench.workers.look()
    pending = bench.workers.issue(MESSAGE_OF_TWO, no_words)
    assert not pending.is_ready()


# A new epoch


def test_a_new_epoch_asks_every_stage_until_it_is_ready():
    bench = Bench(first_epoch=1000)
    asked_at: dict[int, list[float]] = {0: [], 1: [], 2: []}

    def answer(stage: int, frame: Frame) -> None:
        assert frame[:4] == (START, 1000, 0, 0)
        assert decode_start(frame.payload) == ORDERS[stage]
        asked_at[stage].append(bench.now - 100)
        if len(asked_at[stage]) > stage:
            bench.say(stage, READY)

    bench.on_send = answer
    assert bench.workers.recover(lambda: False) is True
    assert asked_at == {0: [0], 1: [0, 1], 2: [0, 1, 2]}
    assert bench.workers.epoch == 1000
    assert (bench.ready, bench.suspects) == ([0, 1, 2], [])


def test_a_worker_that_knows_a_later_epoch_lifts_the_next_one_above_it():
    """The epoch is that of an earlier master whose clock was ahead."""
    bench = Bench(first_epoch=1000)
    known = [0, 5000, 7000]

    def answer(stage: int, frame: Frame) -> None:
        if frame.epoch > known[stage]:
            known[stage] = frame.epoch
            bench.say(stage, READY, epoch=frame.epoch)
        else:
            bench.say(stage, PASSED, epoch=known[stage])

    bench.on_send = answer
    assert bench.workers.recover(lambda: False) is True
    assert bench.workers.epoch == 7001
    assert known == [7001] * 3
    assert bench.now < 100 + DEADLINES.retry_seconds, "at once, not when they are asked again"


def test_a_report_of_a_later_epoch_is_ignored_if_it_is_the_current_one_and_malformed_if_impossible():
    bench = Bench().up()
    bench.say(1, PASSED)
    bench.workers.look()
    assert (bench.workers.counters.duplicates, bench.workers.epoch) == (1, 1)
    bench.say(1, PASSED, epoch=2)
    with pytest.raises(
        WorkerLost, match="stage 2: sent a malformed frame: it refers to epoch 2, but the current epoch is 1"
    ):
        bench.workers.look()
    bench.on_send = lambda stage, frame: bench.say(0, PASSED, epoch=1 << 63)
    with pytest.raises(WorkerLost, match=f"stage 1: sent a malformed frame: it refers to epoch {1 << 63}"):
        bench.workers.recover(lambda: False)


def next_addresses(sent: Iterable[tuple[int, Frame]], epoch: int) -> dict[int, str]:
    """The next stage's address in each stage's order of this epoch."""
    orders = [(stage, frame) for stage, frame in sent if (frame.kind, frame.epoch) == (START, epoch)]
    return {stage: decode_start(frame.payload).next_address for stage, frame in orders}


def test_the_stage_before_a_worker_that_moved_gets_its_new_address():
    bench = Bench().up()
    bench.addresses[1] = "another:2"
    bench.workers.look()
    assert bench.sent == [], "while nothing is lost no message is sent"
    bench.arrivals.append(Arrival(1, None, "its node is gone"))
    assert bench.lost().stage == 1
    bench.all_answer()
    assert bench.workers.recover(lambda: False) is True
    assert next_addresses(bench.sent, 2) == {0: "another:2", 1: "three:3", 2: ""}
    assert (bench.workers.epoch, len(bench.sent)) == (2, 3)
    assert [order.next_address for order in bench.workers.orders] == ["another:2", "three:3", ""]


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_a_worker_that_moves_while_an_epoch_starts_begins_another(moved: int):
    """A worker may not take two different orders in one epoch, and one that was ready may be another now."""
    bench = Bench().up()
    bench.arrivals.append(Arrival(moved, None, "its process ended"))
    assert bench.lost().stage == moved
    began = bench.now

    def answer(stage: int, frame: Frame) -> None:
        # The first orders reach all but the one that moves, and the answers to them come late as well.
        if frame.epoch == 3 or stage != moved:
            bench.say(stage, READY, epoch=frame.epoch)
        if frame.epoch == 2 and stage == 2:
            bench.addresses[moved] = "elsewhere:9"
        if frame.epoch == 3 and stage == 0:
            bench.say((moved + 1) % 3, READY, epoch=2)

    bench.on_send = answer
    assert bench.workers.recover(lambda: False) is True
    there = ["one:1", "two:2", "three:3"]
    assert next_addresses(bench.sent, 2) == {0: there[1], 1: there[2], 2: ""}
    there[moved] = "elsewhere:9"
    assert next_addresses(bench.sent, 3) == {0: there[1], 1: there[2], 2: ""}
    assert (bench.workers.epoch, bench.workers.counters.stale) == (3, 1)
    assert bench.now - began == DEADLINES.retry_seconds
    assert bench.suspects == [moved]


def test_workers_that_move_again_and_again_have_twice_the_time_in_all():
    bench = Bench()

    def answer(stage: int, frame: Frame) -> None:
        if stage == 0:
            bench.addresses[1] += "0"

    bench.on_send = answer
    with pytest.raises(WorkerLost, match="was not ready within 10 seconds"):
        bench.workers.recover(lambda: False)
    assert (bench.now, bench.workers.epoch) == (120, 20)


def test_a_stage_that_is_not_ready_in_time_is_named():
    bench = Bench()

    def answer(stage: int, frame: Frame) -> None:
        if stage == 1:
            bench.say(stage, READY)

    bench.on_send = answer
    with pytest.raises(
        WorkerLost, match=r"^stage 1: was not ready within 10 seconds; also not ready: stage 3$"
    ) as caught:
        bench.workers.recover(lambda: False)
    assert caught.value.stage == 0
    assert bench.now == 110
    assert bench.suspects == [0, 2, 0, 2], "each that was not ready, when it should have been and at the end"
    assert bench.ready == [1]
    bench.up()
    assert bench.workers.epoch == 2, "another try is another epoch"


def test_a_stage_that_refuses_its_master_is_named_with_its_reason():
    bench = Bench()
    refused: list[int] = []

    def answer(stage: int, frame: Frame) -> None:
        if stage != 1:
            bench.say(stage, READY)
        elif not refused:  # a refusal that stays the same is reported once
            refused.append(stage)
            bench.arrivals.append(Arrival(stage, None, "digest: this worker has another"))

    bench.on_send = answer
    for _ in range(2):
        with pytest.raises(
            WorkerLost,
            match=r"^stage 2: was not ready within 10 seconds \(digest: this worker has another\)$",
        ):
            bench.workers.recover(lambda: False)


def test_an_interrupted_recovery_goes_on_with_the_same_epoch_and_deadline():
    bench = Bench()
    answers = iter([False, True, True])
    assert bench.workers.recover(lambda: next(answers)) is False
    assert bench.workers.recover(lambda: next(answers)) is False
    assert (bench.workers.epoch, len(bench.sent)) == (1, 3)
    with pytest.raises(WorkerLost):
        bench.workers.recover(lambda: False)
    assert bench.now == 110


def test_messages_from_before_the_new_epoch_are_ignored():
    bench = Bench().up()
    bench.arrivals.append(Arrival(0, None, "connection reset"))
    bench.lost()
    bench.arrivals.append(Arrival(0, b"malformed"))
    bench.arrivals.append(Arrival(0, None, "connection reset once more"))
    bench.up()
    assert bench.workers.epoch == 2


def test_a_stage_without_new_caches_in_time_is_suspected_once_and_asked_on():
    bench = Bench()
    suspected_at: list[float] = []

    def answer(stage: int, frame: Frame) -> None:
        if bench.suspects and not suspected_at:
            suspected_at.append(bench.now)
        if stage != 1 or bench.now >= 108:
            bench.say(stage, READY)

    bench.on_send = answer
    assert bench.workers.recover(lambda: False) is True
    assert bench.suspects == [1]
    assert suspected_at[0] >= 104, "worker_seconds after it was asked"
    assert bench.workers.epoch == 1


def test_a_broken_line_of_a_stage_that_is_not_ready_loses_nothing():
    bench = Bench()
    broken: list[int] = []

    def answer(stage: int, frame: Frame) -> None:
        if stage == 1 and not broken:
            broken.append(stage)
            bench.arrivals.append(Arrival(stage, None, "connection refused"))
        else:
            bench.say(stage, READY)

    bench.on_send = answer
    assert bench.workers.recover(lambda: False) is True
    assert bench.workers.epoch == 1
    assert bench.suspects == [1], "it may have been stopped"


@pytest.mark.parametrize("trouble", [True, False])
def test_a_stage_that_is_lost_again_ends_the_attempt(trouble: bool):
    bench = Bench()

    def answer(stage: int, frame: Frame) -> None:
        if stage == 1:
            bench.say(stage, READY)
            if trouble:
                bench.say(stage, TROUBLE, payload="no memory for caches")
            else:
                bench.arrivals.append(Arrival(stage, None, "no memory for caches"))

    bench.on_send = answer
    with pytest.raises(WorkerLost, match=r"stage 2: .*no memory for caches"):
        bench.workers.recover(lambda: False)
    assert bench.suspects == ([] if trouble else [1])
    bench.arrivals.clear()
    bench.up()
    assert bench.workers.epoch == 2


def test_ready_twice_is_ready_once():
    bench = Bench()

    def answer(stage: int, frame: Frame) -> None:
        if stage == 0:
            bench.say(0, READY)
            bench.say(0, READY)

    bench.on_send = answer
    with pytest.raises(WorkerLost, match="stage 2: was not ready"):
        bench.workers.recover(lambda: False)
    assert bench.ready == [0]


def test_close_ends_the_lines():
    bench = Bench()
    bench.workers.close()
    assert bench.closed


# Workers that will never come up again


def test_a_failure_ends_a_recovery():
    bench = Bench()
    failure = EngineError("stage 2 cannot start")

    def answer(stage: int, frame: Frame) -> None:
        bench.failure = failure

    bench.on_send = answer
    with pytest.raises(EngineError) as caught:
        bench.workers.recover(lambda: False)
    assert caught.value is failure
    assert bench.now <= 100 + DEADLINES.look_seconds
    assert bench.suspects == []


def test_a_failure_is_seen_at_each_look_and_before_a_loss():
    bench = Bench().up()
    bench.workers.look()
    pending = bench.workers.issue(MESSAGE_OF_TWO, no_words)
    bench.arrivals.append(Arrival(0, None, "gone"))
    bench.lost()
    bench.failure = EngineError("stage 1 was started too often")
    for call in (bench.workers.look, pending.is_ready, lambda: bench.workers.issue(MESSAGE_OF_TWO, no_words)):
        with pytest.raises(EngineError, match="too often") as caught:
            call()
        assert not isinstance(caught.value, WorkerLost)


def test_a_failure_is_seen_between_two_arrivals():
    bench = Bench().up()
    bench.workers.issue(MESSAGE_OF_TWO, no_words)
    for _ in range(2):
        bench.time(0, RECEIVED, 0)
    looks = iter([None, EngineError("over")])
    supervision = replace(bench.workers._supervision, failure=lambda: next(looks))  # pyright: ignore[reportPrivateUsage]
    bench.workers._supervision = supervision  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(EngineError, match="over"):
        bench.workers.look()
    assert len(bench.arrivals) == 1


# What each stage says of its iterations


def test_a_stage_reports_the_times_and_bytes_of_an_iteration():
    bench = Bench().up()
    first, second = (
        bench.workers.issue(MESSAGE_OF_TWO, no_words),
        bench.workers.issue(MESSAGE_OF_TWO, no_words),
    )
    bench.time(0, RECEIVED, 0, 10.0)
    bench.time(0, RECEIVED, 1, 10.5)
    bench.time(0, DONE, 0, 11.0, 300)
    bench.time(0, DONE, 1, 12.0, 200)
    bench.time(1, RECEIVED, 0, 7.0)
    bench.time(2, RECEIVED, 0, 20.0)
    bench.tokens(0, 7, 8)
    assert first.is_ready() and not second.is_ready()
    stages = bench.workers.stages
    assert [(stage.received, stage.done, stage.link_bytes) for stage in stages] == [
        (2, 2, 500),
        (1, 0, 0),
        (1, 0, 0),
    ]
    assert list(stages[0].times) == [IterationTimes(1, 0, 0, 10.0, 11.0), IterationTimes(1, 1, 0, 10.5, 12.0)]
    assert list(stages[1].times) == []
    (last,) = stages[2].times
    assert last[:4] == (1, 0, 2, 20.0) and math.isnan(last.done)


def test_duplicate_and_stale_frames_count_once():
    bench = Bench().up()
    bench.workers.issue(MESSAGE_OF_TWO, no_words)
    for _ in range(2):
        bench.time(0, RECEIVED, 0, 10.0)
        bench.time(0, DONE, 0, 11.0, 300)
    bench.workers.look()
    assert bench.workers.counters.duplicates == 2
    bench.say(1, TROUBLE, payload="")
    bench.lost()
    bench.up()
    bench.workers.issue(MESSAGE_OF_TWO, no_words)
    bench.say(0, DONE, 0, encode_stage_time(StageTime(12.0, 300)), epoch=1)
    bench.time(0, DONE, 0, 13.0, 5)  # its RECEIVED was lost
    bench.workers.look()
    stage = bench.workers.stages[0]
    assert (stage.received, stage.done, stage.link_bytes, len(stage.times)) == (1, 2, 305, 2)
    assert math.isnan(stage.times[1].received) and stage.times[1].done == 13.0


def test_what_was_heard_in_one_epoch_is_nothing_in_the_next():
    bench = Bench().up()
    bench.workers.issue(MESSAGE_OF_TWO, no_words)
    bench.time(0, RECEIVED, 0, 10.0)
    bench.say(1, TROUBLE, payload="")
    bench.lost()
    bench.up()
    bench.workers.issue(MESSAGE_OF_TWO, no_words)
    bench.time(0, DONE, 0, 12.0)
    bench.workers.look()
    ((epoch, *_, received, done),) = bench.workers.stages[0].times
    assert (epoch, done) == (2, 12.0) and math.isnan(received)


def test_the_last_stage_is_done_when_its_tokens_come():
    bench = Bench().up()
    bench.workers.issue(MESSAGE_OF_TWO, no_words)
    bench.time(2, RECEIVED, 0, 20.0)
    bench.time(2, DONE, 0, 21.0)  # which it need not say
    bench.workers.look()
    assert list(bench.workers.stages[2].times) == []
    bench.tokens(0, 7, 8)
    bench.workers.look()
    assert [times.received for times in bench.workers.stages[2].times] == [20.0]


def test_times_are_kept_in_bounded_memory():
    bench = Bench().up()
    for i in range(5000):
        bench.workers.issue(MESSAGE_OF_TWO, no_words)
        bench.time(0, RECEIVED, i, float(i))
        bench.time(0, DONE, i, i + 0.5)
        bench.time(1, RECEIVED, i, float(i))  # and is never done
        bench.tokens(i, 7, 8)
    bench.workers.look()
    first, second, last = bench.workers.stages
    assert (len(first.times), len(second.times), len(last.times)) == (4096, 0, 4096)
    assert (first.times[0].iteration, first.times[-1].iteration) == (904, 4999)
    assert first.done == second.received == 5000
    bench.workers.issue(MESSAGE_OF_TWO, no_words)
    for stage in (0, 1):
        bench.time(stage, DONE, 5000 - stage, 6000.0)
    bench.workers.look()
    assert len(second.received_at) < 4096


def test_one_engine_has_one_shape():
    orders = [*ORDERS[:2], replace(ORDERS[2], shape=replace(SHAPE, n_rows=5))]
    with pytest.raises(AssertionError, match="one shape"):
        RemoteWorkers(Bench(), orders=orders, clock=lambda: 0.0, deadlines=DEADLINES)


# The engine master over them


def engine_of(bench: Bench) -> tuple[RemoteEngine, KVManager]:
    kv = KVManager(n_blocks=64, block_size=4, n_rows=12, max_blocks_per_row=8)
    return RemoteEngine(bench.workers, kv, vocab_size=300, n_workers=3), kv


def test_the_engine_master_sends_what_it_sends_to_a_local_worker():
    bench = Bench().up()
    engine, kv = engine_of(bench)
    assert isinstance(engine, RecoverableEngine)
    request = Request("r", (5, 6, 7), 9, SamplingParams(temperature=0.5), seed=3)
    request.row = kv.reserve(9)
    iteration = engine.issue([(request, 3)])
    message = decode_message(bench.sent[-1][1].payload, SHAPE)
    assert message.token_ids.tolist() == [5, 6, 7] and message.initiation.tolist() == [True]
    assert message.sampling["seed"].tolist() == [3]
    assert engine.wait(iteration, lambda: True) is None
    bench.tokens(0, 42)
    returned = engine.wait(iteration, lambda: False)
    assert returned is not None
    assert returned.token_ids == [42]


def test_a_loss_is_raised_as_it_is_and_the_engine_can_go_on():
    bench = Bench().up()
    engine, kv = engine_of(bench)
    requests = [Request(name, (5, 6, 7), 9, SamplingParams(), seed=3) for name in "ab"]
    for request in requests:
        request.row = kv.reserve(9)
    first, _ = [engine.issue([(request, 3)]) for request in requests]
    bench.say(2, TROUBLE, payload="out of memory")
    with pytest.raises(WorkerLost, match="stage 3: out of memory") as caught:
        engine.wait(first, lambda: False)
    assert caught.value.__cause__ is None
    with pytest.raises(WorkerLost):
        engine.look()
    bench.all_answer()
    assert engine.recover(lambda: False)
    engine.look()
    again = engine.issue([(requests[0], 3)])
    bench.tokens(0, 1)
    returned = engine.wait(again, lambda: False)
    assert returned is not None and returned.token_ids == [1]


def test_a_message_that_cannot_be_sent_is_an_engine_error():
    bench = Bench().up()
    engine, _ = engine_of(bench)
    with pytest.raises(EngineError, match="iteration 0 failed"):
        engine.issue([(Request("r", (2**40,), 9, SamplingParams(), seed=3), 1)])


# Their configuration


def test_deadlines_and_bounds_are_checked_when_made():
    with pytest.raises(ConfigError, match="worker_seconds 1 is below iteration_seconds 2"):
        Deadlines(iteration_seconds=2, worker_seconds=1)
    for wrong in (0, -1, float("inf"), float("nan"), True, "1"):
        with pytest.raises(ConfigError, match="retry_seconds is"):
            Deadlines(retry_seconds=wrong)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ConfigError, match="seconds is"):
            RestartBound(seconds=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="restarts is -1"):
        RestartBound(restarts=-1)


def test_adapters_are_written_before_the_next_iteration_and_forgotten_after_a_loss() -> None:
    bench = Bench().up()
    for version, slot in ((4, 0), (5, 1), (6, 1)):  # nothing was issued before the last one came
        bench.workers.put_adapter(version, slot)
    for _ in range(2):
        bench.workers.issue(MESSAGE_OF_TWO, no_words)
    messages = [decode_message(frame.payload, SHAPE) for _, frame in bench.sent]
    assert [message.put_adapters.tolist() for message in messages] == [[[4, 0], [6, 1]], []]
    bench.workers.put_adapter(7, 0)
    bench.arrivals.append(Arrival(1, None, "it died"))
    assert bench.lost().stage == 1
    bench.up()
    bench.workers.issue(MESSAGE_OF_TWO, no_words)
    ((_, frame),) = bench.sent
    assert decode_message(frame.payload, SHAPE).put_adapters.tolist() == []
