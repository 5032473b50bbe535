"""What an engine takes of the cluster: cores and GPUs of one node, or a placement group over several."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orca_jax.config import ParallelConfig
from orca_jax.errors import ConfigError
from server.ray.settings import ReplicaOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class StageNeeds:
    """What the actor of one stage takes of its node."""

    cpus: float
    gpus: float


def gpus_of(parallel: ParallelConfig, replicas: ReplicaOptions, cluster: Mapping[str, float]) -> float:
    """The GPUs of a replica: one for each device, where the cluster has GPUs and the stages run in it."""
    if replicas.gpus_per_replica is not None:
        return replicas.gpus_per_replica
    return float(parallel.n_devices) if cluster.get("GPU") and parallel.workers is None else 0.0


def stage_needs(
    parallel: ParallelConfig, replicas: ReplicaOptions, cluster: Mapping[str, float]
) -> StageNeeds:
    """What each stage's actor takes: as many cores as an engine master, and its part of the GPUs."""
    gpus = gpus_of(parallel, replicas, cluster) / parallel.pipeline_parallel
    return StageNeeds(cpus=replicas.cpus_per_replica, gpus=gpus)


def replica_placement(
    parallel: ParallelConfig, replicas: ReplicaOptions, cluster: Mapping[str, float]
) -> dict[str, Any]:
    """The options of the engines' deployment; `cluster` is what the cluster's nodes have together.

    With actors for the stages: bundle 0 for the engine master, and one for each stage. Raises ConfigError.
    """
    cpus, gpus = replicas.cpus_per_replica, gpus_of(parallel, replicas, cluster)
    if not replicas.stage_actors:
        return {"ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus}}
    stage = stage_needs(parallel, replicas, cluster)
    if not cpus:
        raise ConfigError(
            "cpus_per_replica is 0; with stage_actors it must be above, for Ray has no empty bundle"
        )
    bundle = {"CPU": stage.cpus} | ({"GPU": stage.gpus} if stage.gpus else {})
    return {
        "ray_actor_options": {"num_cpus": cpus},
        "placement_group_bundles": [{"CPU": cpus}, *[bundle] * parallel.pipeline_parallel],
        "placement_group_strategy": replicas.stage_strategy,
    }
