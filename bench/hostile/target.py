"""The server from an attacker's view: its address, the duration of the attack, and its answers."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from bench.server.http_client import post

ADDRESS = "127.0.0.1"  # the attackers' address; gRPC's cannot use another
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OUTPUT_FAILED = "500 output_failed"  # for a request whose grammar could not continue
_SHORT = 120  # characters of a message
_MOST_KEPT = 4096  # bytes of an answer
_REST_SECONDS = 0.02  # pause after a connection that failed at once

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class Answers:
    """Counts the answers to the attacker by kind, with each kind's first message. It sent `n_bytes`."""

    n: Counter[str] = field(default_factory=Counter[str])
    messages: dict[str, str] = field(default_factory=dict[str, str])
    n_bytes: int = 0

    def note(self, kind: str, message: str = "") -> None:
        """Add an answer."""
        self.n[kind] += 1
        if message:
            self.messages.setdefault(kind, message[:_SHORT])


class Target:
    """The target of one attack; `number` is the round, so that an attack can send something new each time."""

    def __init__(self, http: tuple[str, int], rpc: str, *, seconds: float, number: int) -> None:
        self.host, self.port = http
        self.rpc = rpc
        self.number = number
        self.answers = Answers()
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Remaining seconds; 0 when the attack is over."""
        return max(0.0, self._end - time.monotonic())

    async def repeat(self, n: int, action: Callable[[], Awaitable[object]]) -> None:
        """Repeat `action` until the time is over, `n` concurrently; then cancel the unfinished ones."""

        async def attempt() -> None:
            while self.left:
                before = time.monotonic()
                await action()
                if time.monotonic() - before < 1e-3:  # refused at once: leave the processor to the server
                    await asyncio.sleep(_REST_SECONDS)

        tasks = [asyncio.create_task(attempt()) for _ in range(n)]
        _, pending = await asyncio.wait(tasks, timeout=self.left)
        for task in pending:
            task.cancel()
        if pending:
            self.answers.n["not answered yet"] += len(pending)
            await asyncio.wait(pending)
        for task in tasks:
            if not task.cancelled():
                task.result()

    def post(self, path: str, body: object) -> bytes:
        """A request with its own connection."""
        return post(self.host, self.port, path, body)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Streams]:
        """A connection, aborted at the end. Raises OSError."""
        async with asyncio.timeout(self.left + 1.0):
            reader, writer = await asyncio.open_connection(self.host, self.port, local_addr=(ADDRESS, 0))
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def ask(self, request: bytes) -> None:
        """Send a request and record the answer."""
        try:
            async with self.connection() as (reader, writer):
                writer.write(request)
                self.answers.n_bytes += len(request)
                await self.note_answer(reader)
        except OSError as error:
            self.note_error(error)

    async def note_answer(self, reader: asyncio.StreamReader) -> None:
        """Record the answer's status and the start of its body; reads to the end of the connection."""
        answer = await reader.read(1 << 16)
        if not answer:
            self.answers.note("closed without an answer")
            return
        while more := await reader.read(1 << 16):
            if len(answer) < _MOST_KEPT:  # head and body may arrive separately
                answer += more
        status = answer.split(b" ", 2)[1].decode(errors="replace") if b" " in answer else "no HTTP"
        if status == "500" and b'"output_failed"' in answer:
            status = OUTPUT_FAILED
        self.answers.note(status, "" if status == "200" else message_of(answer))

    def note_error(self, error: Exception) -> None:
        """Record a connection or a call that failed."""
        if isinstance(error, grpc.aio.AioRpcError):
            self.answers.note(error.code().name, error.details() or "")
        elif isinstance(error, TimeoutError):
            self.answers.note("no answer")
        else:
            self.answers.note("connection refused or reset", str(error))

    async def flood(self, n: int, requests: Sequence[bytes]) -> None:
        """Send `requests` in turn, repeatedly, `n` concurrently."""
        numbers = iter(range(1 << 62))
        await self.repeat(n, lambda: self.ask(requests[next(numbers) % len(requests)]))


def message_of(answer: bytes) -> str:
    """The error message in the start of an answer, or the beginning of its body."""
    body = answer.partition(b"\r\n\r\n")[2]
    begin, end = body.find(b"{"), body.rfind(b"}")
    try:
        return json.loads(body[begin : end + 1])["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace").strip()
