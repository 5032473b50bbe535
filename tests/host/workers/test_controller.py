"""A worker's controller, driven one event at a time."""

from dataclasses import replace

import numpy as np
import pytest

from orca_jax.control.frame import (
    DONE,
    MESSAGE,
    READY,
    RECEIVED,
    START,
    TOKENS,
    TROUBLE,
    WORDS,
    Frame,
    StageTime,
    decode_frame,
    decode_stage_time,
    encode_frame,
)
from orca_jax.control.message_wire import encode_message
from orca_jax.control.start_order import StartOrder, encode_start
from orca_jax.control.worker_pb2 import Iteration, Start, Tokens
from orca_jax.iteration.message import ControlMessage
from orca_jax.request.sampled import Sampled
from orca_jax.workers.controller import Controller
from tests.host.control.test_message_wire import ONE, SHAPE, message_of

ORDER = StartOrder(shape=SHAPE, next_address="next:1", worker_seconds=4.0, ready_seconds=50.0)


def start(epoch: int, order: StartOrder = ORDER) -> Frame:
    return Frame(START, epoch, payload=encode_start(order))


def message_payload(iteration: int) -> Iteration:
    """A payload that is different for each iteration."""
    return encode_message(message_of([ONE, {**ONE, "seed": iteration}]), SHAPE)


class Bench:
    """A controller whose calls to everything around it are in one log."""

    def __init__(self, stage: int = 0, n_stages: int = 3) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.reports: list[Frame] = []
        self.forwarded: list[bytes] = []
        self.messages: list[ControlMessage] = []
        self.words: list[list[int]] = []
        self.orders: list[StartOrder] = []
        self.addresses: list[str] = []
        self.makes_programs = False
        self.controller = Controller(
            stage,
            n_stages,
            lines=self,
            device=self,
            clock=lambda: self.now,
        )

    # Lines

    def connect(self, address: str) -> None:
        self.addresses.append(address)

    def forward(self, data: bytes) -> None:
        self.forwarded.append(data)
        self.log.append("forward")

    def report(self, data: bytes) -> None:
        frame = decode_frame(data)
        self.reports.append(frame)
        self.log.append(f"{frame.kind.name} {frame.epoch}.{frame.iteration}")

    # StageDevice

    def start(self, epoch: int, order: StartOrder) -> bool:
        self.orders.append(order)
        self.log.append(f"start {epoch}")
        return self.makes_programs

    def allow(self, epoch: int, iteration: int, words: np.ndarray) -> None:
        self.words.append(words.tolist())
        self.log.append(f"allow {epoch}.{iteration}")

    def run(self, epoch: int, iteration: int, message: ControlMessage) -> None:
        self.messages.append(message)
        self.log.append(f"run {epoch}.{iteration}")

    # What the tests say

    def up(self, epoch: int = 1) -> "Bench":
        self.take(start(epoch))
        self.controller.started(epoch)
        self.log.clear()
        return self

    def take(self, frame: Frame) -> list[str]:
        return self.take_bytes(encode_frame(frame))

    def take_bytes(self, data: bytes) -> list[str]:
        n = len(self.log)
        self.controller.take(data)
        return self.log[n:]

    def message(self, iteration: int, epoch: int = 1) -> list[str]:
        return self.take(
            Frame(
                MESSAGE,
                epoch,
                iteration,
                0,
                encode_message(message_of([ONE, {**ONE, "seed": iteration}]), SHAPE),
            )
        )


def tokens(*token_ids: int) -> Sampled:
    return Sampled(np.array(token_ids, np.int32))


def test_an_epoch_starts_when_the_device_is_ready():
    bench = Bench()
    assert bench.take(start(4)) == ["start 4"]
    bench.controller.started(4)
    assert bench.reports == [Frame(READY, 4, 0, 0)]
    assert bench.controller.epoch == 4


def test_a_message_goes_on_before_it_is_run():
    bench = Bench(stage=1).up()
    assert bench.message(0) == ["forward", "RECEIVED 1.0", "run 1.0"]
    assert bench.forwarded == [encode_frame(Frame(MESSAGE, 1, 0, 0, message_payload(0)))]
    assert bench.messages[0].row.tolist() == [3, 3]
    assert bench.message(1) == ["forward", "RECEIVED 1.1", "run 1.1"], "it waits for no device"
    assert bench.reports[-1].stage == 1


def test_the_last_stage_returns_tokens_without_padding():
    bench = Bench(stage=2).up()
    assert bench.message(0) == ["RECEIVED 1.0", "run 1.0"]
    bench.controller.done(1, 0, tokens(7, 8, -1, -1))
    assert bench.reports[-1] == Frame(TOKENS, 1, 0, 2, Tokens(token_ids=tokens(7, 8).token_ids.tobytes()))


def test_the_other_stages_report_when_they_are_done():
    bench = Bench().up()
    bench.message(0)
    bench.now = 7.5
    bench.controller.done(1, 0, link_bytes=1 << 33)
    assert bench.reports[-1][:4] == (DONE, 1, 0, 0)
    assert decode_stage_time(bench.reports[-1].payload) == StageTime(7.5, 1 << 33)


def test_a_message_that_comes_twice_runs_once():
    bench = Bench().up()
    bench.message(0)
    assert bench.message(0) == []
    bench.message(1)
    assert bench.message(0) == []
    assert bench.controller.counters.duplicates == 2


def test_a_gap_ends_the_epoch():
    bench = Bench(stage=1).up()
    bench.message(0)
    assert bench.message(2) == ["TROUBLE 1.0"]
    assert bench.reports[-1].payload == "iteration 2 came before iteration 1"
    assert bench.message(1) == ["TROUBLE 1.0"], "nothing runs any more"
    bench.controller.done(1, 0)
    assert bench.log[-1] == "TROUBLE 1.0"
    assert bench.take(start(1)) == ["TROUBLE 1.0"], "what was given up is not taken up"
    assert bench.take(start(2)) == ["start 2"]


def test_a_new_epoch_ends_the_previous_one():
    bench = Bench(stage=2).up()
    bench.message(0)
    assert bench.take(start(2)) == ["start 2"]
    bench.controller.done(1, 0, tokens(1, 2))
    bench.controller.failed(1, "too late to matter")
    assert bench.log[-1] == "start 2", "news of the old epoch is no news"
    bench.controller.started(2)
    assert bench.message(0, epoch=2) == ["RECEIVED 2.0", "run 2.0"], "iterations count from 0 again"


def test_masks_of_an_old_epoch_are_dropped():
    bench = Bench().up(3)
    assert bench.message(0, epoch=2) == []
    assert bench.take(start(2)) == ["PASSED 3.0"], "a request for an old epoch is answered so"
    assert bench.controller.counters.stale == 2
    assert bench.message(0, epoch=3)[-1] == "run 3.0"


def test_an_epoch_that_was_overtaken_while_it_started_is_never_ready():
    bench = Bench()
    bench.take(start(1))
    bench.take(start(2))
    bench.controller.started(1)
    assert bench.reports == []
    bench.controller.started(2)
    assert bench.reports == [Frame(READY, 2, 0, 0)]


def test_a_start_that_comes_again_is_answered_again():
    bench = Bench()
    bench.take(start(1))
    assert bench.take(start(1)) == []
    bench.controller.started(1)
    bench.message(0)
    assert bench.take(start(1)) == ["READY 1.0"]
    assert bench.message(1)[-1] == "run 1.1"


@pytest.mark.parametrize("started", [False, True])
def test_a_process_without_the_epoch_reports_it(started: bool):
    bench = Bench().up(1) if started else Bench()
    assert bench.message(5, epoch=7) == ["TROUBLE 7.0"], "in the epoch that it was asked in"
    bench = Bench()
    bench.take(start(7))
    assert bench.message(0, epoch=7) == ["TROUBLE 7.0"], "its caches are not ready"


@pytest.mark.parametrize(
    "malformed",
    [
        b"",
        b"GET / HTTP/1.1",
        encode_frame(Frame(READY, 1)),
        encode_frame(Frame(TOKENS, 1, 0, 0, Tokens(token_ids=b"abcd"))),
        encode_frame(Frame(MESSAGE, 1, 0, 0, Iteration(token_ids=b"abcd"))),
        encode_frame(Frame(START, 1)),
        encode_frame(Frame(START, 2)),
        encode_frame(Frame(START, 2, payload=Start(next_address="next:1"))),
        encode_frame(Frame(READY, 2)) + b"}",
        encode_frame(start(1, replace(ORDER, worker_seconds=5.0))),
    ],
)
def test_a_malformed_frame_ends_the_epoch_and_runs_nothing(malformed: bytes):
    bench = Bench(stage=2).up()
    assert bench.take_bytes(malformed)[-1] == "TROUBLE 1.0"
    assert "a malformed frame came" in bench.reports[-1].payload
    assert not bench.messages
    assert bench.controller.counters.malformed == 1


def test_a_malformed_frame_without_an_epoch_is_dropped():
    bench = Bench()
    assert bench.take_bytes(b"GET / HTTP/1.1") == []
    assert bench.take(start(1)) == ["start 1"]


def test_a_device_that_fails_ends_the_epoch():
    bench = Bench().up()
    bench.message(0)
    bench.controller.failed(1, "out of memory")
    bench.controller.failed(1, "and once more")
    assert [frame.payload for frame in bench.reports if frame.kind is TROUBLE] == ["out of memory"]
    assert bench.controller.deadline() == float("inf")


def test_a_device_that_cannot_start_reports_it():
    bench = Bench()
    bench.take(start(1))
    bench.controller.failed(1, "no memory for caches")
    assert bench.reports == [Frame(TROUBLE, 1, 0, 0, "no memory for caches")]


def test_a_worker_past_its_deadline_must_exit():
    bench = Bench().up()
    controller = bench.controller
    assert controller.deadline() == float("inf") and controller.overdue() is None
    bench.now = 10.0
    bench.message(0)
    bench.now = 11.0
    bench.message(1)
    assert controller.deadline() == 14.0
    bench.now = 13.0
    controller.done(1, 0)
    assert controller.deadline() == 17.0, "from when the one before was done"
    bench.now = 16.9
    assert controller.overdue() is None
    bench.now = 17.0
    assert controller.overdue() == "the device did not finish iteration 1 within 4 seconds; the worker exits"
    assert bench.reports[-1].kind is TROUBLE
    assert controller.deadline() == float("inf")


def test_new_caches_have_a_deadline_as_well():
    bench = Bench()
    bench.take(start(1))
    bench.now = 4.0
    assert "did not finish new caches within 4 seconds" in (bench.controller.overdue() or "")
    assert bench.reports == [], "the next process is asked in the same epoch, and may be ready for it"


def test_done_out_of_order_is_our_own_mistake():
    bench = Bench().up()
    bench.message(0)
    bench.message(1)
    with pytest.raises(AssertionError, match="iteration 1 finished before 0"):
        bench.controller.done(1, 1)


def test_received_has_the_iteration_and_its_time():
    bench = Bench(stage=2).up()
    for bench.now in (3.0, 4.5):
        bench.message(int(bench.now) - 3)
    received = [frame for frame in bench.reports if frame.kind is RECEIVED]
    assert [(frame.epoch, frame.iteration, frame.stage) for frame in received] == [(1, 0, 2), (1, 1, 2)]
    times = [decode_stage_time(frame.payload) for frame in received]
    assert times == [StageTime(3.0, 0), StageTime(4.5, 0)]


# What a START orders


def test_a_start_has_the_sizes_and_the_next_stage():
    bench = Bench().up(1)
    assert bench.take(start(1)) == ["READY 1.0"]
    assert (bench.orders, bench.addresses) == ([ORDER], ["next:1"]), "once for each epoch"
    small = replace(ORDER, shape=replace(SHAPE, max_rows=1), next_address="next:2")
    assert bench.take(start(2, small)) == ["start 2"]
    bench.controller.started(2)
    assert (bench.orders, bench.addresses) == ([ORDER, small], ["next:1", "next:2"])
    assert bench.message(0, epoch=2)[-1] == "TROUBLE 2.0"
    assert "2 rows" in bench.reports[-1].payload, "the sizes are those of the order in force"


def test_the_last_stage_connects_to_no_next_stage():
    bench = Bench(stage=2)
    bench.take(start(1, replace(ORDER, next_address="")))
    bench.controller.started(1)
    bench.take(start(2))
    assert bench.addresses == []
    assert len(bench.orders) == 2


def test_another_stage_has_to_know_the_next_one():
    bench = Bench(stage=1)
    assert bench.take(start(1, replace(ORDER, next_address=""))) == []
    assert bench.controller.counters.malformed == 1
    assert bench.controller.epoch == 0


def test_an_order_that_cannot_be_read_leaves_a_new_process_as_it_is():
    bench = Bench()
    assert bench.take(Frame(START, 3, payload=Start())) == []
    assert (bench.controller.epoch, bench.controller.counters.malformed) == (0, 1)
    assert bench.take(start(3)) == ["start 3"]


def test_programs_that_have_to_be_made_first_have_the_time_of_a_recovery():
    bench = Bench()
    bench.makes_programs = True
    bench.now = 10.0
    bench.take(start(1))
    assert bench.controller.deadline() == 60.0
    bench.now = 59.0
    assert bench.controller.overdue() is None
    bench.now = 60.0
    why = bench.controller.overdue()
    assert (
        why
        == "the device did not finish programs, weights and new caches within 50 seconds; the worker exits"
    )


def test_an_iteration_has_no_longer_for_it():
    bench = Bench()
    bench.makes_programs = True
    bench.take(start(1))
    bench.now = 40.0
    bench.controller.started(1)
    assert bench.controller.deadline() == float("inf")
    bench.message(0)
    assert bench.controller.deadline() == 44.0


def test_the_seconds_are_those_of_the_order_in_force():
    bench = Bench().up(1)
    bench.take(start(2, replace(ORDER, worker_seconds=7.0)))
    assert bench.controller.deadline() == 7.0
    bench.now = 7.0
    assert "new caches within 7 seconds" in (bench.controller.overdue() or "")


# What constrained rows allow, straight from the master


def words(iteration: int, *values: int, epoch: int = 1) -> Frame:
    return Frame(WORDS, epoch, iteration, 0, np.array(values, "<i4").tobytes())


def test_masks_reach_the_last_stage_s_device_before_or_after_their_message():
    bench = Bench(stage=2).up()
    assert bench.take(words(0, 5, -1)) == ["allow 1.0"]
    assert bench.message(0) == ["RECEIVED 1.0", "run 1.0"]
    bench.message(1)
    assert bench.take(words(1, 7)) == ["allow 1.1"]
    assert bench.words == [[5, -1], [7]]


def test_words_of_what_is_done_are_not_looked_at():
    bench = Bench(stage=2).up()
    bench.message(0)
    bench.controller.done(1, 0, tokens(7, 8))
    assert bench.take(words(0, 5)) == []
    assert bench.controller.counters.duplicates == 1


def test_words_of_another_epoch_change_nothing():
    bench = Bench(stage=2).up(epoch=4)
    assert bench.take(words(0, 5, epoch=3)) == bench.take(words(0, 5, epoch=9)) == []
    assert bench.controller.counters.stale == 1


@pytest.mark.parametrize(
    ("stage", "frame"),
    [
        (1, words(0, 5)),  # another stage samples nothing
        (2, Frame(WORDS, 1, 0, 0, b"abc")),
        (2, words(1 << 20, 5)),
    ],
)
def test_words_that_do_not_belong_are_malformed(stage: int, frame: Frame):
    bench = Bench(stage=stage).up()
    assert bench.take(frame) == ["TROUBLE 1.0"]
    assert bench.controller.counters.malformed == 1
