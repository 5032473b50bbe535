"""The stages of a model: their layers and devices in this process (ORCA 4.1, Figure 6)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from orca_jax.config import ParallelConfig
from orca_jax.errors import ConfigError
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import stage_parameters
from orca_jax.planning.stage_layers import check_split, stage_layers
from orca_jax.sharding.device_group import Device, DeviceGroup
from orca_jax.sharding.specs import held_specs

Placement = Mapping[str, Any]  # for each parameter of a stage its Sharding, or a FormedWeight of Shardings

_ONE_DEVICE = ParallelConfig()


@dataclass(frozen=True)
class StagePart:
    """One stage: its layers, and the devices over which each is split."""

    layers: range
    group: DeviceGroup
    first: bool
    last: bool

    def placement(self, config: ModelConfig) -> Placement:
        """The sharding of each of the stage's parameters, or of each array of its form."""
        return {
            name: jax.tree.map(self.group.place, held_specs(parameter, len(self.group)))
            for name, parameter in stage_parameters(config, self.layers).items()
        }


def split_model(
    config: ModelConfig, devices: Sequence[Device], parallel: ParallelConfig = _ONE_DEVICE
) -> tuple[StagePart, ...]:
    """Split a model into stages, which take the first of `devices` in order.

    Raises ConfigError if there are too few devices or the model cannot be split this way.
    """
    check_split(config, parallel)
    n_stages, n_each = parallel.pipeline_parallel, parallel.tensor_parallel
    if parallel.n_devices > len(devices):
        raise ConfigError(
            f"pipeline_parallel {n_stages} times tensor_parallel {n_each} needs {parallel.n_devices} "
            f"devices; JAX has {len(devices)} ({devices[0].device_kind})"
        )
    groups = [devices[i * n_each : (i + 1) * n_each] for i in range(n_stages)]
    return tuple(_part(config, parallel, i, group) for i, group in enumerate(groups))


def one_stage(
    config: ModelConfig, devices: Sequence[Device], parallel: ParallelConfig, stage: int
) -> StagePart:
    """One stage, counted from 0, on the first devices of its own process.

    Raises ConfigError as `split_model` does.
    """
    check_split(config, parallel)
    n_devices = parallel.tensor_parallel
    if n_devices > len(devices):
        raise ConfigError(
            f"tensor_parallel {n_devices} needs {n_devices} devices in the worker's process; JAX has "
            f"{len(devices)} there ({devices[0].device_kind})"
        )
    return _part(config, parallel, stage, devices[:n_devices])


def _part(config: ModelConfig, parallel: ParallelConfig, stage: int, devices: Sequence[Device]) -> StagePart:
    n_stages = parallel.pipeline_parallel
    return StagePart(
        stage_layers(config.n_layers, n_stages)[stage],
        DeviceGroup(tuple(devices), parallel.expert_exchange),
        first=stage == 0,
        last=stage == n_stages - 1,
    )
