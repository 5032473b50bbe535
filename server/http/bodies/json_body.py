"""Bodies in JSON: read, checked and made the route's model beside the event loop.

Every router with a body is made with `APIRouter(route_class=JsonRoute)`.
"""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from server.gateway.side_threads import run_for_request
from server.http.bodies.json_text import parse
from server.http.fields.not_built import refuse_what_is_not_built

_MOST_ERRORS = 64  # those of one field stand together, and the first field is told


class JsonRoute(APIRoute):
    """A route whose body, if it has one, must be JSON by its header and by every letter.

    Without the header a web page could make a visitor's browser send requests here unasked. What the body
    asks for and is not built is refused here too: it takes a look at all of it.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's hook: what answers a request."""
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def handle(request: Request) -> Response:
            _check_content_type(request.headers.get("content-type"))
            read = _ReadRequest(request.scope, request.receive)
            try:
                data = await read.body()
            except ClientDisconnect as error:
                raise HTTPException(400, "the client left before its body was complete") from error
            if data:
                read.value = await run_for_request(len(data), partial(self._value, data))
            return await handler(read)

        return handle

    def _value(self, data: bytes) -> Any:
        """The body as the route takes it: FastAPI validates it again, and leaves a model as it is.

        Raises HTTPException, RequestValidationError with FastAPI's own errors, and NotSupported.
        """
        body = parse(data)
        assert self.body_field is not None
        value, errors = self.body_field.validate(body, loc=("body",))
        if errors:
            raise RequestValidationError(errors[:_MOST_ERRORS], body=body)
        if isinstance(value, BaseModel):
            refuse_what_is_not_built(value)
        return value


class _ReadRequest(Request):
    """A request whose body has been read already."""

    value: Any = None

    async def json(self) -> Any:
        """What FastAPI takes for the body's JSON."""
        return self.value


def _check_content_type(value: str | None) -> None:
    media_type = (value or "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        came = f"Content-Type is {value[:100]!r}" if value else "the request has no Content-Type"
        raise HTTPException(415, f"{came}; send the header 'Content-Type: application/json'")
