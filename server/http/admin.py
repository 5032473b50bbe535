"""Routes with which an operator controls the engine: `/admin`, and vLLM's for LoRA adapters.

They exist only if there is an admin key.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from orca_jax.errors import ConfigError, RequestsStillRunning, UnknownAdapter
from orca_jax.service.engine_controls import MAX_VERSION, EngineControls
from orca_jax.service.interludes import Running
from server.errors import UnknownModel
from server.http.bodies.errors import error_responses
from server.http.bodies.json_body import JsonRoute
from server.http.fields.strict import Strict
from server.http.state import GatewayOf

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


class _Change(Strict):
    """A change of the engine that waits for running requests."""

    running: _Running = "finish"
    timeout: _Timeout = 600.0


class UpdateWeights(_Change):
    """POST /admin/update_weights: `directory` has a checkpoint of the same model, on the server's machine."""

    directory: Annotated[str, Field(min_length=1, max_length=4096)]
    version: Annotated[
        int | None, Field(ge=1, le=MAX_VERSION, description="default: the current one plus 1")
    ] = None


class Sleep(_Change):
    """POST /admin/sleep: level 1 frees the memory of keys and values, level 2 also that of the weights."""

    level: Annotated[int, Field(ge=1, le=2)] = 1


class Pause(_Change):
    """POST /admin/pause."""

    running: _Running = "continue"


class LoadAdapter(Strict):
    """POST /v1/load_lora_adapter: `lora_path` is a PEFT directory on the server's machine."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: Annotated[
        bool, Field(description="replace an adapter of this name; requests that have it keep the old one")
    ] = False


class UnloadAdapter(Strict):
    """POST /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]


class WakeUp(Strict):
    """POST /admin/wake_up."""

    timeout: _Timeout = 600.0


async def _controls(request: Request) -> EngineControls:
    controls = request.app.state.gateway.model().controls
    assert controls is not None, "there is an admin key"
    return controls


ControlsOf = Annotated[EngineControls, Depends(_controls)]


@router.get("/state")
async def state(controls: ControlsOf) -> State:
    """Get the version of the weights, and whether the engine is paused or asleep."""
    return _state(controls)


@router.post("/update_weights")
async def update_weights(controls: ControlsOf, body: UpdateWeights) -> State:
    """Replace the weights. If that fails, the old weights stay in use."""
    if "\0" in body.directory:
        raise ConfigError("directory contains a zero byte; give a path")
    update = partial(controls.update_weights, body.directory, version=body.version)
    return await _do(controls, partial(update, running=body.running, timeout=body.timeout))


@router.post("/sleep")
async def sleep(controls: ControlsOf, body: Sleep) -> State:
    """Free device memory. Requests are refused until `wake_up`."""
    work = partial(controls.sleep, body.level, running=body.running, timeout=body.timeout)
    return await _do(controls, work)


@router.post("/wake_up")
async def wake_up(controls: ControlsOf, body: WakeUp) -> State:
    """End a sleep."""
    return await _do(controls, partial(controls.wake_up, timeout=body.timeout))


@router.post("/pause")
async def pause(controls: ControlsOf, body: Pause) -> State:
    """Run no iterations until `resume`. Requests are accepted, and wait."""
    return await _do(controls, partial(controls.pause, running=body.running, timeout=body.timeout))


@router.post("/resume")
async def resume(controls: ControlsOf) -> State:
    """End a pause."""
    controls.resume()
    return _state(controls)


adapters = APIRouter(
    prefix="/v1", tags=["admin"], route_class=JsonRoute, responses=error_responses(400, 401, 404, 503)
)


@adapters.post("/load_lora_adapter", response_class=PlainTextResponse)
async def load_lora_adapter(gateway: GatewayOf, controls: ControlsOf, body: LoadAdapter) -> str:
    """Let requests choose a LoRA adapter by its name. Requests run on meanwhile."""
    if "\0" in body.lora_path:
        raise ConfigError("lora_path contains a zero byte; give a path")
    if body.lora_name == gateway.model().name:
        raise ConfigError(f"lora_name is {body.lora_name!r}, the model's name; choose another")
    load = partial(controls.load_adapter, body.lora_name, body.lora_path, replace=body.load_inplace)
    await asyncio.get_running_loop().run_in_executor(_THREAD, load)
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


@adapters.post("/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_lora_adapter(controls: ControlsOf, body: UnloadAdapter) -> str:
    """Let no more requests choose a LoRA adapter; those that have it go on."""
    try:
        controls.unload_adapter(body.lora_name)
    except UnknownAdapter as error:
        raise UnknownModel(str(error)) from error
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


async def _do(controls: EngineControls, work: Callable[[], object]) -> State:
    """Do work that may take long, on a thread. Raises RequestsStillRunning during another change."""
    if controls.busy:
        raise RequestsStillRunning("another change of the engine is under way; try again when it is done")
    await asyncio.get_running_loop().run_in_executor(_THREAD, work)
    return _state(controls)


def _state(controls: EngineControls) -> State:
    return State(weights_version=controls.weights_version, paused=controls.paused, asleep=controls.asleep)
