"""A worker's controller, told what happens one thing at a time."""

import numpy as np
import pytest

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
    decode_frame,
    encode_frame,
)
from orca_jax.worker_controller import Controller
from tests.host.test_control_wire import ONE, WIRE, message_of

DEADLINES = Deadlines(iteration_seconds=2, worker_seconds=4)


class Bench:
    """A controller with everything around it noted, in one log."""

    def __init__(self, stage: int = 0, n_stages: int = 3) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.reports: list[Frame] = []
        self.forwarded: list[bytes] = []
        self.messages: list[ControlMessage] = []
        self.controller = Controller(
            stage,
            n_stages,
            lines=self,
            device=self,
            wire=WIRE,
            clock=lambda: self.now,
            deadlines=DEADLINES,
        )

    # Lines

    def forward(self, data: bytes) -> None:
        self.forwarded.append(data)
        self.log.append("forward")

    def report(self, data: bytes) -> None:
        frame = decode_frame(data)
        self.reports.append(frame)
        self.log.append(f"{frame.kind.name} {frame.epoch}.{frame.iteration}")

    # StageDevice

    def start(self, epoch: int) -> None:
        self.log.append(f"start {epoch}")

    def run(self, epoch: int, iteration: int, message: ControlMessage) -> None:
        self.messages.append(message)
        self.log.append(f"run {epoch}.{iteration}")

    # What the tests say

    def up(self, epoch: int = 1) -> "Bench":
        self.take(Frame(START, epoch))
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
        return self.take(Frame(MESSAGE, epoch, iteration, 0, WIRE.encode(message_of([ONE, ONE], iteration))))


def tokens(*token_ids: int) -> np.ndarray:
    return np.array(token_ids, np.int32)


def test_an_epoch_starts_when_the_device_is_ready():
    bench = Bench()
    assert bench.take(Frame(START, 4)) == ["start 4"]
    bench.controller.started(4)
    assert bench.reports == [Frame(READY, 4, 0, 0)]
    assert bench.controller.epoch == 4


def test_a_message_goes_on_before_it_is_run():
    bench = Bench(stage=1).up()
    assert bench.message(0) == ["forward", "RECEIVED 1.0", "run 1.0"]
    assert bench.forwarded == [encode_frame(Frame(MESSAGE, 1, 0, 0, WIRE.encode(message_of([ONE, ONE], 0))))]
    assert bench.messages[0].row.tolist() == [3, 3]
    assert bench.message(1) == ["forward", "RECEIVED 1.1", "run 1.1"], "it waits for no device"
    assert bench.reports[-1].stage == 1


def test_the_last_stage_returns_tokens_without_padding():
    bench = Bench(stage=2).up()
    assert bench.message(0) == ["RECEIVED 1.0", "run 1.0"]
    bench.controller.done(1, 0, tokens(7, 8, -1, -1))
    assert bench.reports[-1] == Frame(TOKENS, 1, 0, 2, tokens(7, 8).tobytes())


def test_the_others_say_that_they_are_done():
    bench = Bench().up()
    bench.message(0)
    bench.controller.done(1, 0)
    assert bench.reports[-1] == Frame(DONE, 1, 0, 0)


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
    assert bench.reports[-1].payload == b"iteration 2 came, and 1 did not"
    assert bench.message(1) == ["TROUBLE 1.0"], "nothing runs any more"
    bench.controller.done(1, 0)
    assert bench.log[-1] == "TROUBLE 1.0"
    assert bench.take(Frame(START, 1)) == ["TROUBLE 1.0"], "what was given up is not taken up"
    assert bench.take(Frame(START, 2)) == ["start 2"]


def test_a_new_epoch_ends_the_one_before():
    bench = Bench(stage=2).up()
    bench.message(0)
    assert bench.take(Frame(START, 2)) == ["start 2"]
    bench.controller.done(1, 0, tokens(1, 2))
    bench.controller.failed(1, "too late to matter")
    assert bench.log[-1] == "start 2", "news of the old epoch is no news"
    bench.controller.started(2)
    assert bench.message(0, epoch=2) == ["RECEIVED 2.0", "run 2.0"], "iterations count from 0 again"


def test_what_is_of_an_old_epoch_is_dropped():
    bench = Bench().up(3)
    assert bench.message(0, epoch=2) == []
    assert bench.take(Frame(START, 2)) == []
    assert bench.controller.counters.stale == 2
    assert bench.message(0, epoch=3)[-1] == "run 3.0"


def test_an_epoch_that_was_overtaken_while_it_started_is_never_ready():
    bench = Bench()
    bench.take(Frame(START, 1))
    bench.take(Frame(START, 2))
    bench.controller.started(1)
    assert bench.reports == []
    bench.controller.started(2)
    assert bench.reports == [Frame(READY, 2, 0, 0)]


def test_a_start_that_comes_again_is_answered_again():
    bench = Bench()
    bench.take(Frame(START, 1))
    assert bench.take(Frame(START, 1)) == []
    bench.controller.started(1)
    bench.message(0)
    assert bench.take(Frame(START, 1)) == ["READY 1.0"]
    assert bench.message(1)[-1] == "run 1.1"


@pytest.mark.parametrize("started", [False, True])
def test_a_process_without_the_epoch_says_so(started: bool):
    bench = Bench().up(1) if started else Bench()
    assert bench.message(5, epoch=7) == ["TROUBLE 7.0"], "in the epoch that it was asked in"
    bench = Bench()
    bench.take(Frame(START, 7))
    assert bench.message(0, epoch=7) == ["TROUBLE 7.0"], "its caches are not ready"


@pytest.mark.parametrize(
    "rubbish",
    [
        b"",
        b"GET / HTTP/1.1",
        encode_frame(Frame(READY, 1)),
        encode_frame(Frame(TOKENS, 1, 0, 0, b"abcd")),
        encode_frame(Frame(MESSAGE, 1, 0, 0, b"abcd")),
    ],
)
def test_rubbish_ends_the_epoch_and_runs_nothing(rubbish: bytes):
    bench = Bench(stage=2).up()
    assert bench.take_bytes(rubbish)[-1] == "TROUBLE 1.0"
    assert b"rubbish came" in bench.reports[-1].payload
    assert not bench.messages
    assert bench.controller.counters.rubbish == 1


def test_rubbish_without_an_epoch_is_dropped():
    bench = Bench()
    assert bench.take_bytes(b"GET / HTTP/1.1") == []
    assert bench.take(Frame(START, 1)) == ["start 1"]


def test_a_device_that_fails_ends_the_epoch():
    bench = Bench().up()
    bench.message(0)
    bench.controller.failed(1, "out of memory")
    bench.controller.failed(1, "and once more")
    assert [frame.payload for frame in bench.reports if frame.kind is TROUBLE] == [b"out of memory"]
    assert bench.controller.deadline() == float("inf")


def test_a_device_that_cannot_start_says_so():
    bench = Bench()
    bench.take(Frame(START, 1))
    bench.controller.failed(1, "no memory for caches")
    assert bench.reports == [Frame(TROUBLE, 1, 0, 0, b"no memory for caches")]


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
    bench.take(Frame(START, 1))
    bench.now = 4.0
    assert "did not finish new caches within 4 seconds" in (bench.controller.overdue() or "")
    assert bench.reports == [], "the next process is asked in the same epoch, and may be ready for it"


def test_done_out_of_order_is_our_own_mistake():
    bench = Bench().up()
    bench.message(0)
    bench.message(1)
    with pytest.raises(AssertionError, match="iteration 1 is done before 0"):
        bench.controller.done(1, 1)


def test_received_says_which_iteration():
    bench = Bench().up()
    bench.message(0)
    bench.message(1)
    received = [frame for frame in bench.reports if frame.kind is RECEIVED]
    assert [(frame.epoch, frame.iteration, frame.stage) for frame in received] == [(1, 0, 0), (1, 1, 0)]
