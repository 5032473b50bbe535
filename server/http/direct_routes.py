"""Answers the routes that generate without FastAPI's routing, dependencies and middleware.

Those take a third of a short completion's time on the event loop (bench/server/delivery.py). The routes are
declared with FastAPI all the same: it describes them in the OpenAPI document, and answers all others.
"""

import inspect
from collections.abc import Awaitable, Iterable
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.http.bodies.json_body import JsonRoute, name_unused
from server.http.state import ApiCall

_PARAMETERS = {"body", "call"}
_NO_BODY = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}


class DirectRoutes:
    """ASGI middleware that answers POST to the JSON routes whose functions take `body` and `call` alone.

    Errors go to the handlers of `app`, which answers all other requests.
    """

    def __init__(self, app: FastAPI, routers: Iterable[APIRouter]) -> None:
        self._app = app
        self._routes = {
            route.path: route
            for router in routers
            for route in router.routes
            if isinstance(route, JsonRoute) and _is_direct(route)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = (
            self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        )
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["app"], scope["route"] = self._app, route
        request = Request(scope, receive)
        began = False

        def send_and_note(message: Message) -> Awaitable[None]:
            nonlocal began
            began = True
            return send(message)

        try:
            response = await _answer(route, request)
            await response(scope, receive, send_and_note)
        except Exception as error:
            if began:
                raise
            handlers = self._app.exception_handlers
            kind = next(kind for kind in type(error).__mro__ if kind in handlers)
            handler: Any = handlers[kind]  # all of ours are async (bodies/errors.py)
            response = await handler(request, error)
            await response(scope, receive, send)
            if kind is Exception:
                raise  # as Starlette does, so that the server logs it


def _is_direct(route: JsonRoute) -> bool:
    parameters = inspect.signature(route.endpoint).parameters
    return route.methods == {"POST"} and route.body_field is not None and parameters.keys() == _PARAMETERS


async def _answer(route: JsonRoute, request: Request) -> Response:
    body = await route.read(request)
    if body is None:
        raise RequestValidationError([_NO_BODY])
    response = await route.endpoint(body=body, call=ApiCall(request, len(await request.body())))
    name_unused(request, response)
    return response
