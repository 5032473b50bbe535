"""The cluster resources that an engine requests, checked without Ray in the numbers passed to it."""

from typing import Any

import pytest

from orca_jax.errors import OrcaError
from server.ray.settings import ray_settings
from server.ray.stages import StageNeeds, replica_placement, stage_needs

GPUS = {"CPU": 64.0, "GPU": 16.0}


def placement(cluster: dict[str, float], **args: Any) -> dict[str, Any]:
    settings, replicas = ray_settings(args, {})
    return replica_placement(settings.engine, replicas, cluster)


@pytest.mark.parametrize(
    ("args", "gpus"),
    [
        ({}, 1),
        ({"tensor_parallel": 4}, 4),
        ({"tensor_parallel": 2, "pipeline_parallel": 3}, 6),
        ({"pipeline_parallel": 3, "worker_processes": True}, 3),
        ({"pipeline_parallel": 2, "gpus_per_replica": 0.5}, 0.5),
        ({"gpus_per_replica": 0}, 0),
        ({"workers": "a:1,b:2"}, 0),  # their GPUs are not of this cluster
    ],
)
def test_an_engine_has_a_gpu_for_each_device(args: dict[str, Any], gpus: float) -> None:
    assert placement(GPUS, **args) == {"ray_actor_options": {"num_cpus": 1, "num_gpus": gpus}}


def test_without_gpus_in_the_cluster_none_is_requested() -> None:
    options = {"num_cpus": 2, "num_gpus": 0}
    assert placement({"CPU": 4.0}, tensor_parallel=2, cpus_per_replica=2) == {"ray_actor_options": options}


def test_each_stage_actor_has_a_bundle_after_the_engine_masters() -> None:
    args = {"tensor_parallel": 4, "pipeline_parallel": 2, "stage_actors": "true", "cpus_per_replica": 3}
    assert placement(GPUS, **args, stage_strategy="SPREAD") == {
        "ray_actor_options": {"num_cpus": 3},
        "placement_group_bundles": [{"CPU": 3}, {"CPU": 3, "GPU": 4}, {"CPU": 3, "GPU": 4}],
        "placement_group_strategy": "SPREAD",
    }
    assert placement({}, **args)["placement_group_bundles"] == [{"CPU": 3}] * 3
    settings, replicas = ray_settings(args, {})
    parallel = settings.engine
    assert parallel.worker_processes, "the replica's own process has no stage"
    assert stage_needs(parallel, replicas, GPUS) == StageNeeds(cpus=3, gpus=4)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"stage_actors": True, "workers": "a:1,b:2"}, "stage_actors starts the workers"),
        (
            {"stage_actors": True, "cpus_per_replica": 0},
            "cpus_per_replica is 0; with stage_actors it must be",
        ),
        ({"gpus_per_replica": -1}, "gpus_per_replica is -1; it must not be negative"),
        ({"stage_strategy": "ANYWHERE"}, "stage_strategy: invalid choice"),
    ],
)
def test_an_impossible_placement_is_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(OrcaError, match=message):
        placement(GPUS, **args)
