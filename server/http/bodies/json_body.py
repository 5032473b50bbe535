"""Reads and validates JSON request bodies; long ones are parsed off the event loop.

Make every router whose routes take a body with `APIRouter(route_class=JsonRoute)`.
"""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from server.gateway.side_threads import run_for_request
from server.http.bodies.json_text import parse
from server.http.fields.strict import HEADER, Strict, Unused

_MOST_ERRORS = 64  # enough for all errors of the first field at fault, which alone is reported


class JsonRoute(APIRoute):
    """A route whose body, if it has one, must be valid JSON with a JSON `Content-Type`.

    The required header keeps web pages from making a visitor's browser send requests here (CSRF). Unknown
    and unbuilt fields are rejected, and the response's header `x-orca-ignored` names unused ones: the
    request's `Unused` is in the scope's state (http/state.py).
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def handle(request: Request) -> Response:
            read = _ReadRequest(request.scope, request.receive)
            read.value = await self.read(read)
            response = await handler(read)
            name_unused(read, response)
            return response

        return handle

    async def read(self, request: Request) -> Any:
        """The validated body; None if it is empty. Raises what `_value` raises, and HTTPException."""
        _check_content_type(request.headers.get("content-type"))
        unused = Unused(refuse=request.app.state.options.strict)
        request.scope["state"]["unused"] = unused
        try:
            data = await request.body()
        except ClientDisconnect as error:
            raise HTTPException(400, "the client left before its body was complete") from error
        return await run_for_request(len(data), partial(self._value, data, unused)) if data else None

    def _value(self, data: bytes, unused: Unused) -> Any:
        """Validate the body. FastAPI validates again, but accepts an instance of the model unchanged.

        Raises HTTPException, RequestValidationError, and what `Strict.take` raises.
        """
        body = parse(data)
        assert self.body_field is not None
        value, errors = self.body_field.validate(body, loc=("body",))
        if errors:
            raise RequestValidationError(errors[:_MOST_ERRORS], body=body)
        if isinstance(value, Strict):
            value.take(unused)
        return value


class _ReadRequest(Request):
    """A request whose body has already been read and parsed."""

    value: Any = None

    async def json(self) -> Any:
        return self.value


def name_unused(request: Request, response: Response) -> None:
    """Name the body's unused fields in the response's header."""
    if names := request.scope["state"]["unused"].header():
        response.headers[HEADER] = names


def _check_content_type(value: str | None) -> None:
    media_type = (value or "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        problem = f"Content-Type is {value[:100]!r}" if value else "the request has no Content-Type"
        raise HTTPException(415, f"{problem}; send the header 'Content-Type: application/json'")
