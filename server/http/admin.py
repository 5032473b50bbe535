"""`/admin`: routes with which an operator controls the engine. They exist only if there is an admin key."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field

from orca_jax.errors import ConfigError, RequestsStillRunning
from orca_jax.service.engine_controls import MAX_VERSION, EngineControls
from orca_jax.service.interludes import Running
from server.gateway.gateway import Gateway
from server.http.bodies.errors import error_responses
from server.http.bodies.json_body import JsonRoute
from server.http.fields.strict import Strict
from server.http.generation.state import GatewayOf

router = APIRouter(
    prefix="/admin", tags=["admin"], route_class=JsonRoute, responses=error_responses(400, 401, 409, 503)
)

_MAX_SECONDS = 3600.0
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="admin")  # one change at a time

_Running = Annotated[Running, Field(description="what happens to requests that have begun")]
_Timeout = Annotated[
    float, Field(gt=0, le=_MAX_SECONDS, description="maximum seconds until running requests have finished")
]


class State(BaseModel):
    """The engine's state. `asleep` is the sleep level, 0 while the engine is awake."""

    weights_version: int
    paused: bool
    asleep: int


class UpdateWeights(Strict):
    """POST /admin/update_weights: `directory` has a checkpoint of the same model, on the server's machine."""

    directory: Annotated[str, Field(min_length=1, max_length=4096)]
    version: Annotated[
        int | None, Field(ge=1, le=MAX_VERSION, description="default: the current one plus 1")
    ] = None
    running: _Running = "finish"
    timeout: _Timeout = 600.0


class Sleep(Strict):
    """POST /admin/sleep: level 1 frees the memory of keys and values, level 2 also that of the weights."""

    level: Annotated[int, Field(ge=1, le=2)] = 1
    running: _Running = "finish"
    timeout: _Timeout = 600.0


class Pause(Strict):
    """POST /admin/pause."""

    running: _Running = "continue"
    timeout: _Timeout = 600.0


class WakeUp(Strict):
    """POST /admin/wake_up."""

    timeout: _Timeout = 600.0


@router.get("/state")
async def state(gateway: GatewayOf) -> State:
    """Get the version of the weights, and whether the engine is paused or asleep."""
    return _state(_controls(gateway))


@router.post("/update_weights")
async def update_weights(gateway: GatewayOf, body: UpdateWeights) -> State:
    """Replace the weights. If that fails, the old weights stay in use."""
    controls = _controls(gateway)
    if "\0" in body.directory:
        raise ConfigError("directory contains a zero byte; give a path")
    return await _do(
        controls,
        partial(
            controls.update_weights,
            body.directory,
            version=body.version,
            running=body.running,
            timeout=body.timeout,
        ),
    )


@router.post("/sleep")
async def sleep(gateway: GatewayOf, body: Sleep) -> State:
    """Free device memory. Requests are refused until `wake_up`."""
    controls = _controls(gateway)
    return await _do(
        controls, partial(controls.sleep, body.level, running=body.running, timeout=body.timeout)
    )


@router.post("/wake_up")
async def wake_up(gateway: GatewayOf, body: WakeUp) -> State:
    """End a sleep."""
    controls = _controls(gateway)
    return await _do(controls, partial(controls.wake_up, timeout=body.timeout))


@router.post("/pause")
async def pause(gateway: GatewayOf, body: Pause) -> State:
    """Run no iterations until `resume`. Requests are accepted, and wait."""
    controls = _controls(gateway)
    return await _do(controls, partial(controls.pause, running=body.running, timeout=body.timeout))


@router.post("/resume")
async def resume(gateway: GatewayOf) -> State:
    """End a pause."""
    controls = _controls(gateway)
    controls.resume()
    return _state(controls)


def _controls(gateway: Gateway) -> EngineControls:
    controls = gateway.model().controls
    assert controls is not None, "there is an admin key"
    return controls


async def _do(controls: EngineControls, work: Callable[[], object]) -> State:
    """Do work that may take long, on a thread. Raises RequestsStillRunning during another change."""
    if controls.busy:
        raise RequestsStillRunning("another change of the engine is under way; try again when it is done")
    await asyncio.get_running_loop().run_in_executor(_THREAD, work)
    return _state(controls)


def _state(controls: EngineControls) -> State:
    return State(weights_version=controls.weights_version, paused=controls.paused, asleep=controls.asleep)
