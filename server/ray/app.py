"""The application for Ray Serve: `serve run server.ray.app:build_app model=DIR num_replicas=2`."""

import os
from typing import Any

from ray import serve

from server.ray.door import Door
from server.ray.replica import EngineReplica
from server.ray.settings import ray_settings

_MOST_AT_DOOR = 4096  # requests at once; an engine's own queue is bounded by max_queue
_HEALTH_SECONDS = 5.0
ENGINE, DOOR = "orca-engine", "orca-door"


def build_app(args: dict[str, Any]) -> serve.Application:
    """An application of `num_replicas` engines behind one address.

    `args` are the keys of `orca serve --config` but those of its listener, and the fields of ReplicaOptions.
    Raises UsageError or ConfigError.
    """
    settings, replicas = ray_settings(args, os.environ)
    settings.engine_config()  # a mistake in it is better found here than by each replica
    engine = serve.deployment(
        name=ENGINE,
        num_replicas=replicas.num_replicas,
        # An engine answers 429 itself when its queue is full.
        max_ongoing_requests=_MOST_AT_DOOR,
        ray_actor_options={"num_cpus": replicas.cpus_per_replica},
        graceful_shutdown_timeout_s=settings.endpoint.drain_timeout,
        health_check_period_s=_HEALTH_SECONDS,
        health_check_timeout_s=3 * _HEALTH_SECONDS,
    )(EngineReplica)
    door = serve.deployment(
        name=DOOR,
        num_replicas=replicas.doors,
        max_ongoing_requests=_MOST_AT_DOOR,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=settings.endpoint.drain_timeout,
    )(Door)
    return door.bind(engine.bind(settings), settings.endpoint)
