"""FastAPI dependencies for routes: the server's state, and facts about the current request.

A route asks for them by annotation: `async def route(body: Body, call: CallOf)`. Routes raise
errors as they are (server/http/bodies/errors.py turns them into responses), and `JsonRoute` in
server/http/bodies/json_body.py reads their bodies. The dependencies are async functions because FastAPI runs
others on a thread, for each request.
"""

from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.types import Receive

from orca_jax.request.scheduling_params import SchedulingParams
from server.batches.service import Batches
from server.gateway.gateway import Gateway
from server.gateway.served_model import ServedModel
from server.http.connections.caller import caller_of
from server.http.fields.strict import Unused
from server.settings.endpoint_options import EndpointOptions


async def _gateway(request: Request) -> Gateway:
    return request.app.state.gateway


async def _batches(request: Request) -> Batches:
    return request.app.state.batches


async def _fingerprint(request: Request) -> str:
    return request.app.state.fingerprint(request.scope["state"]["tenant"])


async def _owner(request: Request) -> str:
    return request.scope["state"]["owner"]


async def _call(request: Request) -> "ApiCall":
    return ApiCall(request, len(await request.body()))


async def _unused(request: Request) -> Unused:
    return request.scope["state"]["unused"]


async def _tenant(request: Request) -> str:
    return request.scope["state"]["tenant"]


class ApiCall:
    """A request with a JSON body of `n_bytes`, and what the server knows about its client.

    `owner` is the API key or address whose share of the queue it uses. `tenant` is the API key, "" on a
    server without keys; tenants share no cached keys and values. `facts` go to the access log, and never have
    prompts or output text. `unused` collects the fields that are not used.
    """

    def __init__(self, request: Request, n_bytes: int) -> None:
        server, state = request.app.state, request.scope["state"]
        self.gateway: Gateway = server.gateway
        self.options: EndpointOptions = server.options
        self.receive: Receive = request.receive
        self.caller = caller_of(request.scope)
        self.n_bytes = n_bytes
        self.owner: str = state["owner"]
        self.tenant: str = state["tenant"]
        self.facts: dict[str, Any] = state["facts"]
        self.unused: Unused = state["unused"]

    def accept(self, scheduling: SchedulingParams, *, model: str | None, user: str | None) -> ServedModel:
        """The requested model. Raises InvalidRequest, UnknownModel, NotReady or EngineError."""
        if user is not None:
            self.facts["user"] = user
        served = self.gateway.model(model)
        if scheduling.priority:
            scheduling.check_policy(served.serving.scheduling.scheduling_policy)
        return served


BatchesOf = Annotated[Batches, Depends(_batches)]
CallOf = Annotated[ApiCall, Depends(_call)]
FingerprintOf = Annotated[str, Depends(_fingerprint)]  # of the API key, "" on a server without keys
GatewayOf = Annotated[Gateway, Depends(_gateway)]
OwnerOf = Annotated[str, Depends(_owner)]  # whose share of the queue the request uses
TenantOf = Annotated[str, Depends(_tenant)]  # the API key, "" on a server without keys
UnusedOf = Annotated[Unused, Depends(_unused)]  # only for routes with a JSON body
