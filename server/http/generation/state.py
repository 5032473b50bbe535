"""FastAPI dependencies for routes: the server's state, and facts about the current request.

A route asks for them by annotation: `async def route(gateway: GatewayOf, facts: FactsOf)`. Routes raise
errors as they are (server/http/bodies/errors.py turns them into responses), and `JsonRoute` in
server/http/bodies/json_body.py reads their bodies. The dependencies are async functions because FastAPI runs
others on a thread, for each request.
"""

from typing import Annotated, Any

from fastapi import Depends, Request

from server.gateway.gateway import Gateway
from server.http.fields.strict import Unused
from server.settings.endpoint_options import EndpointOptions


async def _gateway(request: Request) -> Gateway:
    return request.app.state.gateway


async def _options(request: Request) -> EndpointOptions:
    return request.app.state.options


async def _facts(request: Request) -> dict[str, Any]:
    return request.scope["state"]["facts"]


async def _unused(request: Request) -> Unused:
    return request.scope["state"]["unused"]


async def _owner(request: Request) -> str:
    return request.scope["state"]["owner"]


async def _tenant(request: Request) -> str:
    return request.scope["state"]["tenant"]


GatewayOf = Annotated[Gateway, Depends(_gateway)]
OptionsOf = Annotated[EndpointOptions, Depends(_options)]
OwnerOf = Annotated[str, Depends(_owner)]  # the API key or address whose share of the queue the request uses
TenantOf = Annotated[str, Depends(_tenant)]  # the API key, "" without keys; tenants share no keys and values
UnusedOf = Annotated[Unused, Depends(_unused)]  # of a route with a JSON body: fields that are not used
FactsOf = Annotated[dict[str, Any], Depends(_facts)]  # for the access log; never prompts or output text
