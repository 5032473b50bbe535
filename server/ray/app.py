"""The application for Ray Serve: `serve run server.ray.app:build_app model=DIR num_replicas=2`."""

import os
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from orca_jax.config import EngineConfig
from server.ray.door import Door
from server.ray.replica import EngineReplica
from server.ray.routing.prefix_router import PrefixRouter
from server.ray.scaling import LoadPolicy
from server.ray.settings import ReplicaOptions, Router, ray_settings
from server.ray.stages import replica_placement, stage_needs
from server.settings.serve_settings import ServeSettings

_MOST_AT_DOOR = 4096  # requests at once; an engine's own queue is bounded by max_queue
_HEALTH_SECONDS = 2.0  # between two health checks; Ray replaces a replica after the third that fails
_HUNG_SECONDS = 15.0  # without an answer, after which a health check fails
_LOAD_SECONDS = 1.0  # between two reports of an engine's load to the routers
CLOSE_SECONDS = 15.0  # beyond drain_timeout: for the engine to close
_LOOK_SECONDS = 0.5  # how often a stopping replica checks whether requests still run
_LOGGING = {"enable_access_log": False}  # the endpoint writes one, and Ray's costs time
ENGINE, DOOR = "orca-engine", "orca-door"


def build_app(args: dict[str, Any]) -> serve.Application:
    """Build an application of `num_replicas` engines behind one address.

    `args` may have the keys of `orca serve --config`, except those of its listener, and the fields of
    ReplicaOptions. Raises UsageError or ConfigError.
    """
    return application(*ray_settings(args, os.environ))


def application(settings: ServeSettings, replicas: ReplicaOptions) -> serve.Application:
    """Build the application of these settings. Raises ConfigError."""
    config = settings.engine
    cluster = ray.cluster_resources() if ray.is_initialized() else {}
    needs = stage_needs(config, replicas, cluster) if replicas.stage_actors else None
    seconds = settings.endpoint.drain_timeout
    scaling = _scaling(replicas)
    engine = serve.deployment(
        name=ENGINE,
        num_replicas=replicas.num_replicas if scaling is None else None,
        autoscaling_config=scaling,
        # An engine answers 429 itself when its queue is full.
        max_ongoing_requests=_MOST_AT_DOOR,
        **replica_placement(config, replicas, cluster),
        graceful_shutdown_timeout_s=seconds + CLOSE_SECONDS,
        graceful_shutdown_wait_loop_s=_LOOK_SECONDS,
        health_check_period_s=_HEALTH_SECONDS,
        health_check_timeout_s=_HUNG_SECONDS,
        logging_config=_LOGGING,
        request_router_config=_router(replicas.router, config),
    )(EngineReplica)
    door = serve.deployment(
        name=DOOR,
        num_replicas=replicas.doors,
        max_ongoing_requests=_MOST_AT_DOOR,
        max_queued_requests=_MOST_AT_DOOR,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=seconds + CLOSE_SECONDS,
        graceful_shutdown_wait_loop_s=_LOOK_SECONDS,
        logging_config=_LOGGING,
    )(Door)
    return door.bind(
        engine.bind(settings, needs),
        settings.endpoint,
        model_name=settings.model_name,
        api_keys=settings.api_keys,
        admin_keys=settings.admin_keys,
    )


def _scaling(replicas: ReplicaOptions) -> AutoscalingConfig | None:
    """Scale by the load that engines report; None where the number of engines is fixed."""
    low, high = replicas.min_replicas, replicas.max_replicas
    if low is None or high is None:
        return None
    return AutoscalingConfig(
        min_replicas=low,
        max_replicas=high,
        initial_replicas=min(max(replicas.num_replicas, low), high),
        upscale_delay_s=replicas.upscale_delay,
        downscale_delay_s=replicas.downscale_delay,
        look_back_period_s=replicas.load_window,
        policy=AutoscalingPolicy(
            policy_function=LoadPolicy, policy_kwargs={"target_load": replicas.target_load}
        ),
    )


def _router(router: Router, config: EngineConfig) -> RequestRouterConfig:
    if router == "ray":
        return RequestRouterConfig()
    return RequestRouterConfig.model_validate(
        {
            "request_router_class": PrefixRouter,
            "request_router_kwargs": {"places": config.max_batch_size * config.pipeline_parallel},
            "request_routing_stats_period_s": _LOAD_SECONDS,
        }
    )
