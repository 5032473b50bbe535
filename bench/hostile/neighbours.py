"""The well-behaved clients, in a separate process: sixteen short streams and two probes.

One probe asks for /health, one sends a body of 10 kB. They record their longest waits. They use another
loopback address than the attackers, so that a server with limits per address can tell them apart.
"""

import asyncio
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import uvloop

from bench.server.http_client import get, post

ADDRESS = "127.0.0.2"
N_STREAMS = 16
N_OUTPUT = 64
PROBE_SECONDS = 0.02  # from an answer to a probe to its next request
LONG_BYTES = 10_000  # of a body that is read on a thread
CLIENT_SECONDS = 60.0  # the most that a stream or a probe may take
_AGAIN_SECONDS = 0.05  # pause after a failure
_MAX_WRONG = 5


@dataclass(frozen=True, slots=True)
class Waits:
    """Longest waits in seconds, among those that ended since the previous query or are still running.

    `between` is between two chunks of a stream, `first` from a stream's connection to its first chunk,
    `health` for an answer of /health, `long` for one to a body of LONG_BYTES. `wrong` has the first few of
    `n_wrong` failures.
    """

    between: float
    first: float
    health: float
    n_streams: int
    n_probes: int
    n_wrong: int
    wrong: tuple[str, ...]
    long: float = 0.0


def neighbours(connection: Connection) -> None:
    """The program of an OtherProcess: receives (host, port) of HTTP, then answers messages with Waits."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_Neighbours(*connection.recv()).run(connection))


class _Neighbours:
    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._live: set[_Stream] = set()
        self._probes: dict[str, float] = {}  # when the one that runs was started, by kind
        self._forget()

    def _forget(self) -> None:
        self.between = self.first = 0.0
        self.probed = {"/health": 0.0, "/tokenize": 0.0}
        self.n_streams = self.n_probes = self.n_wrong = 0
        self.wrong: list[str] = []

    def fail(self, message: str) -> None:
        self.n_wrong += 1
        if len(self.wrong) < _MAX_WRONG and message not in self.wrong:
            self.wrong.append(message)

    async def run(self, connection: Connection) -> None:
        """Answer queries until the other end closes."""
        loop = asyncio.get_running_loop()
        closed = asyncio.Event()

        def asked() -> None:
            try:
                connection.recv()
            except EOFError:
                loop.remove_reader(connection.fileno())
                closed.set()
            else:
                connection.send(self._waits())

        tasks = [loop.create_task(self._streams(number)) for number in range(N_STREAMS)]
        long = post(self._host, self._port, "/tokenize", b'{"prompt":"a"' + b" " * LONG_BYTES + b"}")
        tasks.append(loop.create_task(self._probe("/health", get(self._host, self._port, "/health"))))
        tasks.append(loop.create_task(self._probe("/tokenize", long)))
        loop.add_reader(connection.fileno(), asked)
        connection.send(None)  # acknowledges the address
        await closed.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    def _waits(self) -> Waits:
        now = time.monotonic()
        for stream in self._live:
            self.note(stream, now)
        for kind, started in self._probes.items():
            self.probed[kind] = max(self.probed[kind], now - started)
        waits = Waits(
            self.between,
            self.first,
            self.probed["/health"],
            self.n_streams,
            self.n_probes,
            self.n_wrong,
            tuple(self.wrong),
            self.probed["/tokenize"],
        )
        self._forget()
        return waits

    def note(self, stream: "_Stream", now: float) -> None:
        """Record a wait of `stream`, ended or still running."""
        wait = now - stream.last
        if stream.has_begun:
            self.between = max(self.between, wait)
        else:
            self.first = max(self.first, wait)

    async def _streams(self, number: int) -> None:
        body = {
            "prompt": [1 + (31 * number + 7 * i) % 250 for i in range(12)],
            "max_tokens": N_OUTPUT,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        request = post(self._host, self._port, "/v1/completions", body)
        loop = asyncio.get_running_loop()
        while True:
            stream = _Stream(self)
            self._live.add(stream)
            try:
                async with asyncio.timeout(CLIENT_SECONDS):
                    transport, _ = await loop.create_connection(
                        lambda stream=stream: stream, self._host, self._port, local_addr=(ADDRESS, 0)
                    )
                    try:
                        transport.write(request)
                        await stream.ended
                    finally:
                        transport.abort()
                if stream.answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                    self.n_streams += 1
                    continue
                self.fail(f"a stream ended so: {bytes(stream.answer[-200:])!r}")
            except (OSError, RuntimeError) as error:  # TimeoutError is an OSError
                self.fail(f"a stream: {type(error).__name__}: {error}")
            finally:
                self._live.discard(stream)
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _probe(self, kind: str, request: bytes) -> None:
        while True:
            started = self._probes[kind] = time.monotonic()
            try:
                async with asyncio.timeout(CLIENT_SECONDS):
                    reader, writer = await asyncio.open_connection(
                        self._host, self._port, local_addr=(ADDRESS, 0)
                    )
                    try:
                        writer.write(request)
                        answer = await reader.read()
                    finally:
                        writer.transport.abort()
                if not answer.startswith(b"HTTP/1.1 200 "):
                    self.fail(f"{kind} was answered with {answer[:100]!r}")
                self.n_probes += kind == "/health"
            except (OSError, RuntimeError) as error:
                self.fail(f"{kind}: {type(error).__name__}: {error}")
            self.probed[kind] = max(self.probed[kind], time.monotonic() - started)
            del self._probes[kind]
            await asyncio.sleep(PROBE_SECONDS)


class _Stream(asyncio.Protocol):
    """One stream's answer as it arrives, with the time of its last chunk."""

    def __init__(self, owner: _Neighbours) -> None:
        self.answer = bytearray()
        self.last = time.monotonic()
        self.has_begun = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = owner

    def data_received(self, data: bytes) -> None:
        self.answer += data
        if self.has_begun or b"data: " in self.answer:
            now = time.monotonic()
            self._owner.note(self, now)
            self.last, self.has_begun = now, True

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
