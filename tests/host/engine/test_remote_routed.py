"""The experts of tokens from three stages, each of which reports those of its layers."""

from dataclasses import replace

import numpy as np
import pytest

from orca_jax.control.frame import DONE, RECEIVED, TOKENS, StageTime, encode_stage_time
from orca_jax.control.worker_pb2 import Tokens
from orca_jax.engine.remote_workers import RemoteTokens
from orca_jax.errors import WorkerLost
from orca_jax.iteration.message import ROUTED
from tests.host.control.test_message_wire import ONE, SHAPE, message_of
from tests.host.engine.test_remote_workers import DEADLINES, ORDERS, Bench, no_words

# Three sparse layers: of the first stage one, of the second none, of the last two.
SPARSE = replace(SHAPE, sparse_layers=3, top_k=2, n_experts=8)
MESSAGE = message_of([{**ONE, "flags": ROUTED}, ONE])


def bench() -> Bench:
    return Bench(orders=[replace(order, shape=SPARSE) for order in ORDERS]).up()


def issue(bench: Bench) -> RemoteTokens:
    return bench.workers.issue(MESSAGE, no_words)


def done(bench: Bench, stage: int, iteration: int, routed: bytes) -> None:
    bench.say(stage, DONE, iteration, encode_stage_time(StageTime(1.0, 0, routed)))


def tokens(bench: Bench, iteration: int, routed: bytes) -> None:
    ids = np.array([7, 8], "<i4").tobytes()
    bench.say(2, TOKENS, iteration, Tokens(token_ids=ids, routed=routed))


@pytest.mark.parametrize("last", [0, 1, 2])
def test_an_iteration_is_complete_once_all_stages_have_reported_their_experts(last: int) -> None:
    here = bench()
    pending, after = issue(here), here.workers.issue(message_of([ONE, ONE]), no_words)
    say = [
        lambda: done(here, 0, 0, bytes([1, 2])),
        lambda: done(here, 1, 0, b""),
        lambda: tokens(here, 0, bytes([3, 4, 5, 6])),
    ]
    say.append(say.pop(last))
    say[0]()
    say[1]()
    assert not pending.is_ready()
    here.tokens(1, 5, 6)
    assert after.is_ready() and not pending.is_ready()  # later iterations need not wait for its report
    say[2]()
    assert pending.is_ready()
    sampled = pending.fetch()
    assert sampled.token_ids.tolist() == [7, 8]
    assert {place: ids.tolist() for place, ids in sampled.routed.items()} == {0: [[[1, 2], [3, 4], [5, 6]]]}
    assert not after.fetch().routed


def test_a_stage_that_does_not_tell_is_the_late_one() -> None:
    here = bench()
    pending = issue(here)
    for stage in range(3):
        here.time(stage, RECEIVED, 0)
    done(here, 0, 0, bytes([1, 2]))
    tokens(here, 0, bytes([3, 4, 5, 6]))
    assert not pending.is_ready()
    here.now += DEADLINES.iteration_seconds
    lost = here.lost()
    assert lost.stage == 1 and "did not finish iteration 0" in str(lost)


@pytest.mark.parametrize(
    ("routed", "complaint"),
    [
        (bytes([1]), "the experts of 1 tokens have 1 bytes"),
        (bytes([1, 8]), "an expert is 8"),
        (bytes([1, 2, 3, 4]), "the stages reported 4 layers with experts; there are 3"),
        (b"", "the stages reported 2 layers with experts; there are 3"),
    ],
)
def test_wrong_experts_are_a_loss(routed: bytes, complaint: str) -> None:
    here = bench()
    pending = issue(here)
    tokens(here, 0, bytes([3, 4, 5, 6]))
    done(here, 1, 0, b"")
    done(here, 0, 0, routed)
    with pytest.raises(WorkerLost, match=complaint):
        pending.is_ready()


def test_experts_that_no_row_asked_for_are_a_loss() -> None:
    here = bench()
    pending = here.workers.issue(message_of([ONE, ONE]), no_words)
    done(here, 0, 0, bytes([1, 2]))
    with pytest.raises(WorkerLost, match="whose rows ask for none"):
        pending.is_ready()
