"""The application's ingress: it takes HTTP requests, and passes each to one of the engines."""

from collections.abc import AsyncIterator

from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from server.http.bodies.errors import status_response
from server.http.connections.body_limit import read_body
from server.ray.asgi_call import HttpCall
from server.settings.options import EndpointOptions


class Door:
    """Reads a whole request, chooses an engine by it, and passes the engine's response on as it comes."""

    def __init__(self, engine: DeploymentHandle, options: EndpointOptions) -> None:
        self._engine = engine.options(stream=True).call
        self._options = options

    async def __call__(self, request: Request) -> Response:
        options, scope = self._options, request.scope
        try:
            body = await read_body(
                scope, request.receive, max_bytes=options.max_body_bytes, seconds=options.body_timeout
            )
        except HTTPException as error:
            return status_response(error.status_code, error.detail)
        call = HttpCall(
            method=scope["method"],
            path=scope["path"],
            query=scope["query_string"],
            headers=list(scope["headers"]),
            client=scope.get("client"),
            body=body,
        )
        stream = self._engine.remote(call)
        assert isinstance(stream, DeploymentResponseGenerator)
        first, *rest = await anext(aiter(stream))
        response = StreamingResponse(_bodies(rest, stream), first["status"])
        response.raw_headers = first["headers"]
        return response


async def _bodies(
    first: list[Message], stream: DeploymentResponseGenerator[list[Message]]
) -> AsyncIterator[bytes]:
    """The response's body as it comes; if its client leaves, so does the engine's request."""
    try:
        yield b"".join(message.get("body", b"") for message in first)
        async for messages in stream:
            yield b"".join(message.get("body", b"") for message in messages)
    finally:
        stream.cancel()
