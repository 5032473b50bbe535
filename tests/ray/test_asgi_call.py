"""One HTTP request run on an ASGI application, message by message."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import replace

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.gateway.gateway import Gateway
from server.http.observation import Observation
from server.metrics.metrics import Metrics
from server.ray import asgi_call
from server.ray.asgi_call import HttpCall, responses
from server.tracing.call import Call
from server.tracing.tracing import Tracing

CALL = HttpCall(
    method="POST", path="/a b", query=b"x=1", headers=[(b"k", b"v")], client=("::1", 5), body=b"body"
)
START: Message = {"type": "http.response.start", "status": 200, "headers": []}


def body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    assert message["type"] == "http.request" and not message["more_body"]
    await send(START)
    await send(body(f"{scope['method']} {scope['path']} ".encode(), more=True))
    await send(body(message["body"], more=False))


def test_a_whole_request_runs() -> None:
    async def test() -> None:
        messages = [message for part in [p async for p in responses(echo, CALL)] for message in part]
        assert messages == [START, body(b"POST /a b ", more=True), body(b"body", more=False)]

    run(test)


def test_the_callers_trace_reaches_the_engine() -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    begun = list[Call]()

    class Kept(Tracing):
        def begin(self, headers: Iterable[tuple[str, str]]) -> Call:
            begun.append(super().begin(headers))
            return begun[-1]

    class Nowhere:
        def write(self, call: Call, model: str) -> None:
            raise AssertionError("nothing was generated")

        def close(self, seconds: float) -> None:
            pass

    async def test() -> None:
        call = replace(CALL, headers=[(b"traceparent", parent.encode()), (b"tracestate", b"a=1")])
        metrics = Metrics(Gateway())
        app = Observation(echo, access_log="off", metrics=metrics, tracing=Kept(Nowhere()))
        assert [part async for part in responses(app, call)]

    run(test)
    assert [call.caller for call in begun] == [{"traceparent": parent, "tracestate": "a=1"}]


def test_ready_messages_come_before_later_ones_are_made() -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send(START)
            await send(body(b"first", more=True))
            await go.wait()
            await send(body(b"last", more=False))

        parts = responses(app, CALL)
        assert await anext(parts) == [START, body(b"first", more=True)]
        go.set()
        assert [part async for part in parts] == [[body(b"last", more=False)]]

    run(test)


def endless(ends: list[str]) -> ASGIApp:
    """An application that ends once it learns that its client has left."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(START)
        await send(body(b"x", more=True))
        ends.append((await receive())["type"])

    return app


def test_the_application_learns_at_once_that_its_reader_has_left() -> None:
    async def test() -> None:
        ends = list[str]()
        async with aclosing(responses(endless(ends), CALL)) as parts:
            await anext(parts)
        assert ends == ["http.disconnect"]

    run(test)


def test_a_cancelled_reader_has_left_too() -> None:
    async def test() -> None:
        ends = list[str]()

        async def read() -> None:
            async for _ in responses(endless(ends), CALL):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ends == ["http.disconnect"]

    run(test)


def test_an_application_that_ignores_the_disconnect_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi_call, "_GRACE_SECONDS", 0.05)

    async def test() -> None:
        cancelled = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send(START)
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        async with aclosing(responses(app, CALL)) as parts:
            await anext(parts)
        assert cancelled.is_set()

    run(test)


def test_an_error_comes_after_what_was_sent_before_it() -> None:
    async def test() -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send(START)
            raise RuntimeError("broken")

        parts = responses(app, CALL)
        assert await anext(parts) == [START]
        with pytest.raises(RuntimeError, match="broken"):
            await anext(parts)

    run(test)


def test_a_slow_reader_holds_the_application_back() -> None:
    async def test() -> None:
        chunk, n_sent = b"x" * 300_000, 0

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal n_sent
            await send(START)
            for _ in range(20):
                await send(body(chunk, more=True))
                n_sent += 1
            await send(body(b"", more=False))

        parts = responses(app, CALL)
        n_read = len(await anext(parts)) - 1
        assert n_read <= 4  # a MiB and the message that passed it
        for _ in range(100):
            await asyncio.sleep(0)
        assert n_sent - n_read <= 4
        async for part in parts:
            n_read += len(part)
        assert n_read == 21 and n_sent == 20

    run(test)
