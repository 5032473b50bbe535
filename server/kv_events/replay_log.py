"""Keeps the latest batches, and sends them to subscribers that missed some."""

import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import zmq

_SEQUENCE_BYTES = 8
_END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)  # the sequence number after the last batch
_MAX_CLIENTS = 16  # answered at a time; others must ask again
_FULL_SECONDS = 0.001
_STALLED_SECONDS = 10.0  # after which a client that reads nothing is given up
_MAX_REQUEST_BYTES = 1024
_WAITING_MESSAGES = 32  # in ZeroMQ's queue for each client


def sequence_bytes(number: int) -> bytes:
    """Encode a batch's sequence number."""
    return number.to_bytes(_SEQUENCE_BYTES, "big")


class ReplayLog:
    """The latest batches with their sequence numbers: at most `max_batches`, and `max_bytes` in all."""

    def __init__(self, *, max_batches: int = 10_000, max_bytes: int = 64 << 20) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: deque[tuple[int, bytes]] = deque()
        self._n_bytes = 0

    def add(self, number: int, payload: bytes) -> None:
        """Add a batch with a higher number than those before it."""
        self._batches.append((number, payload))
        self._n_bytes += len(payload)
        while len(self._batches) > self._max_batches or self._n_bytes > self._max_bytes:
            self._n_bytes -= len(self._batches.popleft()[1])

    def since(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Iterate over the kept batches from this number on."""
        if not self._batches:
            return iter(())
        # Numbers rise by 1, or by more where events were dropped, so the batch is at this index or before it.
        start = min(max(0, number - self._batches[0][0]), len(self._batches))
        while start and self._batches[start - 1][0] >= number:
            start -= 1
        return islice(self._batches, start, None)


@dataclass(slots=True)
class _Answer:
    """The rest of an answer to a client: the batches from `next` on, and the end."""

    next: int
    moved: float  # when the client last took something, in seconds


class ReplayServer:
    """A ROUTER socket on which subscribers ask for the batches from a sequence number on.

    A request is [number]; the answer is messages [topic, number, payload] and at last ["", -1, ""]. A client
    that does not read is given up after a while and delays no other. Once constructed, it belongs to the one
    thread that calls it. Raises zmq.ZMQError if the address cannot be bound.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, topic: bytes) -> None:
        self._topic = topic
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say so if a client's queue is full
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, _WAITING_MESSAGES)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self._socket.close(linger=0)
            raise

    def close(self) -> None:
        self._socket.close(linger=0)

    def serve(self, log: ReplayLog, seconds: float) -> None:
        """Take requests for `seconds`, and send as much as fits into the clients' queues."""
        end = time.monotonic() + seconds
        while True:
            self._send(log)
            left = max(0.0, end - time.monotonic())
            # A client whose queue was full reads meanwhile, and must not wait for the others' requests.
            if self._socket.poll(round(1000 * (min(left, _FULL_SECONDS) if self._answers else left))):
                self._receive()
            if not left:
                return

    def _receive(self) -> None:
        frames = self._socket.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != _SEQUENCE_BYTES:
            return
        client, _, number = frames
        if client in self._answers or len(self._answers) < _MAX_CLIENTS:
            self._answers[client] = _Answer(int.from_bytes(number, "big"), time.monotonic())

    def _send(self, log: ReplayLog) -> None:
        for client, answer in list(self._answers.items()):
            if self._send_to(client, answer, log) or time.monotonic() - answer.moved > _STALLED_SECONDS:
                del self._answers[client]

    def _send_to(self, client: bytes, answer: _Answer, log: ReplayLog) -> bool:
        """Send as much as fits into this client's queue; True if the answer is complete."""
        try:
            for number, payload in log.since(answer.next):
                frames = [client, b"", self._topic, sequence_bytes(number), payload]
                self._socket.send_multipart(frames, zmq.NOBLOCK)
                answer.next, answer.moved = number + 1, time.monotonic()
            self._socket.send_multipart([client, b"", b"", _END, b""], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:  # the client has gone
            return True
        return True
