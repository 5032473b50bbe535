"""A replica: one engine and the whole endpoint in front of it, in a process of Ray."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import partial

from ray import serve
from ray.util import get_current_placement_group
from starlette.types import Message

from orca_jax.engine.remote_pipeline import StartWorkers
from orca_jax.errors import EngineError
from server.commands.loading import load_served
from server.commands.notes import Notes
from server.commands.router_view import RouterView
from server.gateway.gateway import Gateway, Phase
from server.http.app import create_app
from server.metrics.access_log import configure_access_log
from server.metrics.engine_metrics import batch_load, engine_load
from server.metrics.metrics import Metrics
from server.ray.asgi_call import HttpCall, responses
from server.ray.scaling import LOAD
from server.ray.stages import StageActors, StageNeeds
from server.settings.serve_settings import ServeSettings
from server.tracing.tracing import tracing_to
from server.web.feed import LiveView


class EngineReplica:
    """The deployment of the engines. Ray Serve sends a replica requests once its engine is warm.

    An engine that lost worker processes recovers by itself and stays healthy meanwhile; one that has failed
    for good is unhealthy, and Ray replaces the replica. With `stages` each stage runs in an actor.
    """

    async def __init__(self, settings: ServeSettings, stages: StageNeeds | None = None) -> None:
        configure_access_log(settings.endpoint.access_log)
        logging.getLogger("orca").setLevel(logging.INFO)
        options = settings.endpoint
        self._name = serve.get_replica_context().replica_id.unique_id
        self._gateway = Gateway(request_timeout=options.request_timeout)
        self._metrics = Metrics(self._gateway, settings.routing.metric_names)
        self._tracing = tracing_to(options.otlp_traces_endpoint, os.environ)
        self._app = create_app(
            self._gateway,
            options,
            api_keys=settings.api_keys,
            admin_keys=settings.admin_keys,
            metrics=self._metrics,
            live_view=LiveView.of(self._gateway, settings),
            tracing=self._tracing,
        )
        notes = Notes()
        start = None if stages is None else _stage_actors(stages)
        self._llm, model = await asyncio.to_thread(load_served, settings, notes, start)
        view = RouterView(settings)  # without K/V events, so there is nothing to close
        await asyncio.to_thread(view.open, self._llm, model, self._metrics, notes)
        self._service = model.orca
        if self._tracing is not None:
            self._tracing.start(model)
        self._gateway.open(model)
        self._watch = asyncio.create_task(self._gateway.watch(), name="gateway")

    async def call(self, request: HttpCall) -> AsyncGenerator[list[Message], None]:
        """Yield the response to a request as lists of ASGI messages. Doors call it with `stream=True`."""
        async with aclosing(responses(self._app, request)) as parts:  # ends at once if the client leaves
            async for messages in parts:
                yield messages

    async def state(self) -> tuple[str, Phase]:
        """Return the replica's name, and the engine's phase."""
        return self._name, self._gateway.phase

    async def metrics_page(self) -> tuple[str, str]:
        """Return the replica's name, and its metrics in Prometheus's text format."""
        return self._name, (await self._metrics.scrape()).decode()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load that autoscaling goes by. Ray calls this regularly."""
        return {LOAD: self._load()}

    async def check_health(self) -> None:
        """Ray calls this regularly. Raises EngineError once the engine has failed for good."""
        status = self._gateway.status
        if status.phase is Phase.FAILED:
            raise EngineError(status.reason)

    async def record_routing_stats(self) -> dict[str, float]:
        """Return the load for the routers, in steps of 5 %, because Ray sends every change to all routers.

        Ray calls this regularly.
        """
        return {LOAD: round(20 * self._load()) / 20}

    def _load(self) -> float:
        """Compute how full the engine is: in slots or in rows of batches, whichever is fuller."""
        return max(engine_load(self._service), batch_load(self._service))

    async def __del__(self) -> None:
        """Close the engine. Ray calls this when no request runs any more, or after `drain_timeout`."""
        if not hasattr(self, "_watch"):  # it did not start
            return
        await self._gateway.drain(0)
        self._watch.cancel()
        with suppress(asyncio.CancelledError):
            await self._watch
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        await asyncio.to_thread(self._llm.close)


def _stage_actors(needs: StageNeeds) -> StartWorkers:
    """Return the function that starts an actor for each stage, in this replica's placement group."""
    group = get_current_placement_group()
    assert group is not None, "the deployment has one"
    name = serve.get_replica_context().replica_id.to_full_id_str()
    return partial(StageActors, needs=needs, group=group, name=name)
