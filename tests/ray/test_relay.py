"""Responses to a client when the engine fails; a stand-in plays the engine."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError
from starlette.types import Message

from orca_jax.errors import EngineError
from server.ray.relay import Relay

ID = (b"x-request-id", b"one")
EVENTS: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), ID],
}
JSON: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"application/json"), (b"content-length", b"4"), ID],
}
HANG = asyncio.TimeoutError  # stands for an engine that sends nothing more


def body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


class Played:
    """A played engine: lists of messages, then maybe an error."""

    def __init__(self, *steps: Sequence[Message] | BaseException | type[asyncio.TimeoutError]) -> None:
        self._steps = list(steps)
        self.cancelled = False

    async def __anext__(self) -> list[Message]:
        if not self._steps:
            raise StopAsyncIteration
        step = self._steps.pop(0)
        if step is HANG:
            await asyncio.Event().wait()
        if isinstance(step, BaseException):
            raise step
        return list(cast("Sequence[Message]", step))

    def cancel(self) -> None:
        self.cancelled = True


class Client:
    """The client's response, and the relay's reports to the ingress."""

    def __init__(self) -> None:
        self.messages = list[Message]()
        self.done = list[tuple[int, bool]]()

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    async def receive(self) -> Message:
        return {"type": "http.request"}

    @property
    def text(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def is_complete(self) -> bool:
        return not self.messages[-1].get("more_body", False)


async def _relay(played: Played, client: Client, seconds: float) -> None:
    relay = Relay(cast("Any", played), seconds=seconds, done=lambda *how: client.done.append(how))
    async with asyncio.timeout(30):
        await relay({"type": "http", "method": "POST"}, client.receive, client.send)


def relay(*steps: Sequence[Message] | BaseException | type[asyncio.TimeoutError]) -> Client:
    client, played = Client(), Played(*steps)
    asyncio.run(_relay(played, client, 0.05))
    return client


def test_a_response_passes_unchanged_but_for_the_id_that_the_proxy_sets() -> None:
    client = relay(
        [EVENTS, body(b"a", more=True), body(b"b", more=True)],
        [body(b"c", more=True)],
        [body(b"", more=False)],
    )
    start, *bodies = client.messages
    assert start == {**EVENTS, "headers": [EVENTS["headers"][0]]}
    assert bodies == [body(b"ab", more=True), body(b"c", more=True), body(b"", more=False)]
    assert client.done == [(200, False)]


@pytest.mark.parametrize(
    ("error", "kind", "lost"),
    [
        (ActorDiedError(), "engine_failed", True),
        (asyncio.CancelledError(), "engine_failed", True),  # Ray's own: the relay's task is not cancelled
        (DeploymentUnavailableError(DeploymentID("orca-engine")), "not_ready", False),
        (HANG, "not_ready", False),
        (RayError("internal detail"), "engine_failed", True),
    ],
)
def test_an_engine_lost_before_its_response_is_a_503(error: Any, kind: str, lost: bool) -> None:
    client = relay(error)
    start = client.messages[0]
    headers = dict(start["headers"])
    assert start["status"] == 503 and int(headers[b"retry-after"]) > 0
    problem = json.loads(client.text)["error"]
    assert (
        problem["code"] == kind and "detail" not in problem["message"] and "orca-engine" not in str(problem)
    )
    assert client.is_complete and client.done == [(503, lost)]


def test_an_exception_in_the_engine_is_a_500() -> None:
    client = relay(RayTaskError("call", "a traceback", ValueError("internal detail")))
    assert client.messages[0]["status"] == 500 and b"detail" not in client.text
    assert client.done == [(500, False)]


@pytest.mark.parametrize("error", [ActorDiedError(), asyncio.CancelledError(), HANG])
def test_an_engine_lost_in_a_stream_is_an_error_event(error: Any) -> None:
    client = relay([EVENTS, body(b"data: 1\n\n", more=True)], error)
    first, event, rest = client.text.split(b"\n\n")
    assert first == b"data: 1" and rest == b""
    assert set(json.loads(event.removeprefix(b"data: "))["error"]) == {"message", "type", "param", "code"}
    assert client.is_complete and client.messages[0]["status"] == 200


def test_a_stream_that_ends_too_early_is_an_error_event() -> None:
    client = relay([EVENTS, body(b"data: 1\n\n", more=True)])
    assert b'"code":"engine_failed"' in client.text and client.is_complete


def test_part_of_another_body_is_not_made_to_look_whole() -> None:
    client, played = Client(), Played([JSON, body(b"12", more=True)], ActorDiedError())
    with pytest.raises(EngineError):
        asyncio.run(_relay(played, client, 1.0))
    assert client.text == b"12" and not client.is_complete


def test_an_error_after_the_whole_response_changes_nothing() -> None:
    client = relay([JSON, body(b"1234", more=False)], ActorDiedError())
    assert client.text == b"1234" and client.done == [(200, False)]


def test_a_client_that_leaves_ends_the_engines_request() -> None:
    async def test() -> None:
        client, played = Client(), Played([EVENTS, body(b"a", more=True)], HANG)
        task = asyncio.create_task(_relay(played, client, 30.0))
        while not client.text:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert played.cancelled and client.text == b"a" and client.done == [(200, False)]

    asyncio.run(test())
