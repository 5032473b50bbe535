"""What the routes are given: the server's state, and what is known of the request at hand.

A route asks for them by annotation: `async def route(gateway: GatewayOf, facts: FactsOf)`. Errors are raised
as they are (server/http/bodies/errors.py makes answers of them), and bodies are read by
server/http/bodies/json_body.py's `JsonRoute`. What they are given is asynchronous: FastAPI would have a
thread call anything else, for each request anew.
"""

from typing import Annotated, Any

from fastapi import Depends, Request

from server.gateway.gateway import Gateway
from server.settings.config import EndpointOptions


async def _gateway(request: Request) -> Gateway:
    return request.app.state.gateway


async def _options(request: Request) -> EndpointOptions:
    return request.app.state.options


async def _facts(request: Request) -> dict[str, Any]:
    return request.scope["state"]["facts"]


async def _owner(request: Request) -> str:
    return request.scope["state"]["owner"]


GatewayOf = Annotated[Gateway, Depends(_gateway)]
OptionsOf = Annotated[EndpointOptions, Depends(_options)]
OwnerOf = Annotated[str, Depends(_owner)]  # the API key or the address that a share of the queue belongs to
FactsOf = Annotated[dict[str, Any], Depends(_facts)]  # goes into the access log; never prompts or texts
