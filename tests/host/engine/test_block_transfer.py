"""Blocks over TCP: whole or not at all, only for a server with the secret, never later than the deadline."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from orca_jax.engine.block_transfer import LeaseServer, SocketTransport
from orca_jax.errors import ConfigError
from orca_jax.request.kv_transfer import KVTransferParams, TransferFacts
from orca_jax.request.request import FinishReason
from tests.host.scheduling.test_leases import FACTS, SIZE, Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(8)
    server = LeaseServer("127.0.0.1", 0, FACTS)
    rig.leases.address = ("127.0.0.1", server.port)
    server.start(rig.leases)
    yield rig
    server.close()
    server.close()


class Taker:
    """Follows a fetch, and says what has come."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.results: list[bool] = []
        self.n_arrived = 0
        self.first_token: tuple[int, str] | None = None

    def said(self, token_id: int, proof: str) -> None:
        with self.changed:
            self.first_token = token_id, proof
            self.changed.notify_all()

    def arrived(self, n: int) -> None:
        with self.changed:
            assert self.n_arrived <= n and not self.results
            self.n_arrived = n
            self.changed.notify_all()

    def done(self, ok: bool) -> None:
        with self.changed:
            self.results.append(ok)
            self.changed.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(until, 10.0)


def fetched(
    params: KVTransferParams,
    digest: bytes,
    first: int,
    n: int,
    facts: TransferFacts = FACTS,
    size: int = SIZE,
) -> list[bytes] | None:
    """The blocks that a transport fetches; None for a failure."""
    into, taker = [[bytearray(size - 1), bytearray(1)] for _ in range(n)], Taker()
    transport = SocketTransport(facts)
    transport.fetch(params, digest, first, [[*map(memoryview, each)] for each in into], taker, 5.0, 5.0)
    taker.wait(lambda: bool(taker.results))
    assert taker.n_arrived == n * taker.results[0]
    transport.close()
    transport.fetch(params, digest, first, [], taker, 5.0, 5.0)
    assert taker.results[1:] == [False], "closed"
    return [bytes(a + b) for a, b in into] if taker.results[0] else None


def await_end_of_leases(rig: Rig) -> None:
    """Wait until the server has given the memory of what it sent back."""
    deadline = time.monotonic() + 10.0
    while rig.leases.n_bytes:
        assert time.monotonic() < deadline, "leased memory is not given back"
        time.sleep(0.005)


def test_blocks_arrive_as_they_were_leased(rig: Rig) -> None:
    params, digest = rig.grant(20)
    assert params is not None
    expected = [bytes([block] * SIZE) for block in rig.packed[0].blocks]
    assert fetched(params, digest, 1, 3) == expected[1:4]
    assert fetched(params, digest, 1, 3) is None, "once"
    await_end_of_leases(rig)
    params, digest = rig.grant(20)
    assert params is not None and fetched(params, digest, 0, 0) == []
    await_end_of_leases(rig)


def test_the_first_chunk_s_blocks_arrive_before_the_third_is_computed(rig: Rig) -> None:
    """Each chunk is computed only once the blocks of the one before have arrived."""
    request, taker, transport = rig.request(12), Taker(), SocketTransport(FACTS)
    into = [[memoryview(bytearray(SIZE))] for _ in range(3)]
    rig.compute(request, 4)
    assert request.kv_lease is not None
    transport.fetch(request.kv_lease, FACTS.digest(range(12), ()), 0, into, taker, 5.0, 5.0)
    taker.wait(lambda: taker.n_arrived == 1)
    rig.compute(request, 8)
    taker.wait(lambda: taker.n_arrived == 2)
    assert bytes(into[2][0]) == bytes(SIZE) and not taker.results and taker.first_token is None
    rig.compute(request, 12)
    request.output_ids.append(5)
    rig.leases.grant(request, FinishReason.LENGTH)
    taker.wait(lambda: taker.results == [True])
    assert taker.n_arrived == 3 and taker.first_token is not None and taker.first_token[0] == 5
    assert [bytes(*each) for each in into] == [bytes([*each.blocks] * SIZE) for each in rig.packed]
    await_end_of_leases(rig)
    transport.close()


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("cause", ["cancelled", "other weights", "silence", "the end of the taker"])
def test_a_prompt_that_is_not_computed_to_its_end_ends_its_transfer(rig: Rig, cause: str, first: int) -> None:
    """Blocks that came before are whole, and those that the taker has are not sent."""
    request, taker, transport = rig.request(16), Taker(), SocketTransport(FACTS)
    into = [[memoryview(bytearray(SIZE))] for _ in range(first, 4)]
    rig.compute(request, 12)
    assert request.kv_lease is not None
    seconds = 0.05 if cause == "silence" else 5.0
    transport.fetch(request.kv_lease, FACTS.digest(range(16), ()), first, into, taker, 5.0, seconds)
    taker.wait(lambda: taker.n_arrived == 3 - first)
    if cause == "cancelled":
        rig.leases.grant(request, FinishReason.CANCELLED)
    if cause == "other weights":
        rig.leases.stop()
    if cause == "the end of the taker":
        transport.close()
    taker.wait(lambda: taker.results == [False])
    (packed,) = rig.packed
    assert [bytes(*each) for each in into] == [bytes([b] * SIZE) for b in packed.blocks[first:]] + [
        bytes(SIZE)
    ]
    if cause in ("silence", "the end of the taker"):  # its server finds out when it sends more
        rig.compute(request, 16)
        request.output_ids.append(5)
        rig.leases.grant(request, FinishReason.LENGTH)
    await_end_of_leases(rig)
    transport.close()


def test_what_does_not_fit_together_is_not_sent(rig: Rig) -> None:
    params, digest = rig.grant(20)
    assert params is not None
    assert fetched(params, digest, 0, 5, facts=replace(FACTS, secret="another")) is None
    assert fetched(params, FACTS.digest((1,), ()), 0, 5) is None
    assert rig.leases.n_bytes == 5 * SIZE, "strangers end no lease"
    assert fetched(params, digest, 3, 3) is None, "more than there are"
    params, digest = rig.grant(20)
    assert params is not None and fetched(params, digest, 0, 5, size=SIZE + 1) is None


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n" + b" " * 40, b"orca-kv3" + bytes(32)])
def test_another_server_gets_nothing_and_holds_nobody(said: bytes) -> None:
    """One that closes, one of another protocol, and one that only repeats the greeting."""
    heard = list[bytes]()

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(4096):
                heard.append(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        params = FACTS.new_lease(engine_id="", host="127.0.0.1", port=listener.getsockname()[1], n_blocks=3)
        assert fetched(params, b"", 0, 1) is None
        thread.join(10.0)
    assert bool(heard) == said.startswith(b"orca-kv3") and b"secret" not in b"".join(heard)


@pytest.mark.parametrize(
    "sent", [b"", b"\xff\xff\xff\xff", b"\x02\x00\x00\x00{}", b"\x02\x00\x00\x00[]", b"\x02"]
)
def test_a_client_that_talks_nonsense_ends_only_its_connection(rig: Rig, sent: bytes) -> None:
    params, digest = rig.grant(20)
    assert params is not None
    with socket.create_connection(rig.leases.address, timeout=10.0) as connection:
        assert len(connection.recv(40, socket.MSG_WAITALL)) == 40
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    assert fetched(params, digest, 0, 5) is not None


def test_an_address_in_use_is_refused() -> None:
    match = r"kv_transfer_address is 127.0.0.1:\d+, which cannot be used"
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(ConfigError, match=match):
        LeaseServer("127.0.0.1", listener.getsockname()[1], FACTS)
