"""Passes an engine's response on to the client as it comes, whatever happens to the engine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentResponseGenerator
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from orca_jax.errors import EngineError, OrcaError
from server.errors import NotReady
from server.http.bodies.errors import NOT_READY_SECONDS, error_event, error_response
from server.http.observation import HEADER

_CLIENT_LEFT = 499


class Relay(Response):
    """A response that Ray calls as an ASGI application.

    If the engine is lost before its response began, the client gets a 503 with Retry-After; in the middle of
    a stream of events it gets an error event, as it does for failures in the engine. If the client leaves,
    Ray cancels the call and the engine ends the request. `seconds` bounds each wait for the engine; `done` is
    called with the status and whether the engine was lost.
    """

    def __init__(
        self,
        stream: DeploymentResponseGenerator[list[Message]],
        *,
        path: str = "",
        seconds: float,
        done: Callable[[int, bool], object],
    ) -> None:
        self.status_code = _CLIENT_LEFT  # until the engine sends a status
        self.background = None
        self._stream = stream
        self._path = path
        self._seconds = seconds
        self._done = done
        self._is_events = False
        self._complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        lost = ended = False
        try:
            async for messages in self._messages():
                for message in _joined(messages):
                    await send(self._seen(message))
            ended = True
            if not self._complete:
                raise EngineError("the engine ended the response too early; send the request again")
        except (OrcaError, RayError, RayServeException) as error:
            if not self._complete:  # otherwise the client has all of it
                meaning = _meaning(error)
                lost = isinstance(meaning, EngineError)
                await self._end(meaning, scope, receive, send)
        finally:
            if not ended:
                self._stream.cancel()
            self._done(self.status_code, lost)

    async def _messages(self) -> AsyncIterator[list[Message]]:
        """Yield the engine's messages. Raises OrcaError if it sends none for too long or is stopped."""
        while True:
            try:
                async with asyncio.timeout(self._seconds):
                    messages = await anext(self._stream)
            except StopAsyncIteration:
                return
            except TimeoutError:
                waited = f"no engine has answered within {self._seconds:g} seconds"
                raise NotReady(f"{waited}; send the request again later") from None
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():  # the client has left
                    raise
                # Ray raises this for an engine that it has stopped.
                raise EngineError("the engine was stopped; send the request again") from None
            yield messages

    def _seen(self, message: Message) -> Message:
        """Note what the message says of the response, and return it in the form that Ray's proxy expects."""
        if message["type"] == "http.response.start":
            self.status_code = message["status"]
            # The proxy has passed the request's id on to the engine, and adds the header itself.
            headers = [(name, value) for name, value in message["headers"] if name != HEADER]
            self._is_events = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
            )
            return {**message, "headers": headers}
        self._complete = not message.get("more_body", False)
        return message

    async def _end(self, error: OrcaError, scope: Scope, receive: Receive, send: Send) -> None:
        if self.status_code == _CLIENT_LEFT:  # the response has not begun
            response = error_response(error, path=self._path, retry_after=NOT_READY_SECONDS)
            self.status_code = response.status_code
            await response(scope, receive, send)
        elif self._is_events:
            await send(
                {"type": "http.response.body", "body": error_event(error, self._path), "more_body": False}
            )
        else:  # in a body: the client sees that it is too short, or that Ray closes the connection
            raise error


def _meaning(error: OrcaError | RayError | RayServeException) -> OrcaError:
    """Return the error for the client, which must not learn where the engines are."""
    if isinstance(error, OrcaError) and not isinstance(error, RayError):
        return error
    if isinstance(error, RayTaskError):  # raised in the replica, where Ray logs it
        return OrcaError("the server failed in an unexpected way; its log has more")
    if isinstance(error, RayServeException):
        return NotReady("no engine takes requests at the moment; send the request again later")
    return EngineError("the engine that ran the request is gone; send it again")


def _joined(messages: Iterable[Message]) -> Iterator[Message]:
    """Join the messages into as few as possible: the start of the response, and one body."""
    bodies, last = list[bytes](), None
    for message in messages:
        if message["type"] == "http.response.body":
            bodies.append(message.get("body", b""))
            last = message
        else:
            yield message
    if last is not None:
        more = last.get("more_body", False)
        yield {"type": "http.response.body", "body": b"".join(bodies), "more_body": more}
