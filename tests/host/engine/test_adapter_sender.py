"""Adapters go to workers over a call of their own, on loopback with a real gRPC server at the other end."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import grpc
import pytest

from orca_jax.control.adapter_call import ADAPTER_METHOD, AdapterPiece, encode_pieces, give_adapter
from orca_jax.control.handshake import MASTER, PREVIOUS, metadata
from orca_jax.control.port import ControlPort
from orca_jax.engine.adapter_sender import AdapterSender
from orca_jax.engine.remote_pipeline import StageWorkers
from orca_jax.errors import BadFrame, ServiceClosed, WorkerLost, WorkerRefused, WorkerUnreachable
from tests.host.engine.test_grpc_channel import ABOUT, FIRST, SECOND, SECRET, SOON

PIECES = [
    AdapterPiece("layers.0.qkv.weight", 0, 3, bytes(range(250)) * 40_000, b"\0\1"),  # above gRPC's default
    AdapterPiece("layers.0.qkv.weight", 2, 3, b"", b"\xff" * 7),
]


class Worker:
    """A worker's port that keeps the adapters of its epoch."""

    def __init__(self, ends: ExitStack, *, stage: int = 0, epoch: int = 1) -> None:
        self.epoch, self.taken = epoch, dict[int, list[AdapterPiece]]()
        self.on_call = lambda: None
        self.port = ControlPort(
            "127.0.0.1:0",
            terms=(FIRST, SECOND)[stage],
            secret=SECRET,
            deliver=lambda data: True,
            take_adapter=self.take,
        )
        ends.callback(self.port.close)
        self.port.open(ABOUT)

    def take(self, epoch: int, version: int, pieces: Iterator[AdapterPiece]) -> bool:
        self.on_call()
        if epoch != self.epoch:
            return False
        taken = list(pieces)
        if any(piece.rank > 3 for piece in taken):
            raise BadFrame("there is room for rank 3")
        self.taken[version] = taken
        return True


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def sender(
    workers: list[Worker], epochs: list[int], *, secret: str = SECRET, seconds: float = SOON
) -> AdapterSender:
    """A sender whose master's epoch is the first of `epochs`, and the next one after each question."""
    return AdapterSender(
        StageWorkers(addresses=lambda: [worker.port.address for worker in workers], secret=secret),
        [FIRST, SECOND][: len(workers)],
        epoch=lambda: epochs.pop(0) if len(epochs) > 1 else epochs[0],
        seconds=seconds,
    )


def test_each_stage_gets_its_pieces(ends: ExitStack) -> None:
    workers = [Worker(ends, stage=stage) for stage in (0, 1)]
    sender(workers, [1]).send(7, [lambda: PIECES, lambda: []])
    assert [worker.taken for worker in workers] == [{7: PIECES}, {7: []}]


def test_a_worker_that_does_not_know_the_epoch_yet_is_tried_again(ends: ExitStack) -> None:
    worker = Worker(ends, epoch=1)
    calls = list[int]()

    def third_time() -> None:
        calls.append(1)
        worker.epoch = 2 if len(calls) == 3 else 1

    worker.on_call = third_time
    sender([worker], [2]).send(0, [lambda: PIECES])
    assert worker.taken == {0: PIECES} and len(calls) == 3


def test_the_next_epoch_and_the_end_of_the_engine_end_the_wait(ends: ExitStack) -> None:
    worker = Worker(ends, epoch=1)
    with pytest.raises(WorkerLost, match="another epoch began"):
        sender([worker], [2, 3]).send(0, [lambda: PIECES])
    ending = sender([worker], [2])
    ending.close()
    with pytest.raises(ServiceClosed):
        ending.send(0, [lambda: PIECES])
    with pytest.raises(WorkerUnreachable, match=r"stage 1 at .* did not take an adapter"):
        sender([worker], [2], seconds=0.01).send(0, [lambda: PIECES])
    assert not worker.taken


def test_what_a_worker_refuses_is_not_sent_again(ends: ExitStack) -> None:
    worker = Worker(ends)
    with pytest.raises(WorkerRefused, match="there is room for rank 3"):
        sender([worker], [1]).send(0, [lambda: [PIECES[0]._replace(rank=4)]])
    with pytest.raises(WorkerRefused, match="secret is wrong"):
        sender([worker], [1], secret="another").send(0, [lambda: PIECES])
    other = replace(FIRST, n_layers=3)
    with pytest.raises(WorkerRefused, match="n_layers"):
        give_adapter(worker.port.address, other, SECRET, epoch=1, version=0, pieces=PIECES, seconds=SOON)
    assert not worker.taken


def test_malformed_calls_are_refused(ends: ExitStack) -> None:
    worker = Worker(ends)
    first, *rest = encode_pieces(1, 0, PIECES)
    corrupt = rest[0][:-1] + bytes([rest[0][-1] ^ 1])
    for messages, complaint in (
        (rest, "first message has a weight"),
        ([first, first], "no weight"),
        ([first, corrupt], "checksum does not match"),
        ([first, *list(encode_pieces(1, 1, PIECES))[1:]], "different epochs or versions"),
        ([b"\xff"], "are not a part of an adapter"),
    ):
        with grpc.insecure_channel(worker.port.address) as channel:
            call = channel.stream_unary(ADAPTER_METHOD)
            with pytest.raises(grpc.RpcError, match=complaint):
                call(iter(messages), metadata=metadata(MASTER, FIRST, SECRET), timeout=SOON)
    with grpc.insecure_channel(worker.port.address) as channel:
        call = channel.stream_unary(ADAPTER_METHOD)
        with pytest.raises(grpc.RpcError, match="accepts master, but the caller is 'previous'"):
            call(iter([first]), metadata=metadata(PREVIOUS, FIRST, SECRET), timeout=SOON)
    assert not worker.taken
