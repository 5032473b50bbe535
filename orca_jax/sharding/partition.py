"""A stage's layers and devices, as they lie in this process (ORCA 4.1, Figure 6)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from orca_jax.errors import ConfigError
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import stage_parameters
from orca_jax.planning.stage_layers import check_split, stage_layers
from orca_jax.sharding.device_group import Device, DeviceGroup
from orca_jax.sharding.specs import spec


@dataclass(frozen=True)
class StagePart:
    """One stage: its layers, and the devices that they are split over."""

    layers: range
    group: DeviceGroup
    first: bool
    last: bool

    def placement(self, config: ModelConfig) -> Mapping[str, jax.sharding.Sharding]:
        """Where each of the stage's parameters lies."""
        return {
            name: self.group.place(spec(parameter.axes))
            for name, parameter in stage_parameters(config, self.layers).items()
        }


def split_model(
    config: ModelConfig, devices: Sequence[Device], *, pipeline_parallel: int = 1, tensor_parallel: int = 1
) -> tuple[StagePart, ...]:
    """Stages of `tensor_parallel` devices each, side by side in the order of `devices`; more are left alone.

    Raises ConfigError where the devices are too few or the model cannot be split so.
    """
    check_split(config, pipeline_parallel=pipeline_parallel, tensor_parallel=tensor_parallel)
    n_needed = pipeline_parallel * tensor_parallel
    if n_needed > len(devices):
        raise ConfigError(
            f"pipeline_parallel {pipeline_parallel} times tensor_parallel {tensor_parallel} needs {n_needed} "
            f"devices; JAX has {len(devices)} ({devices[0].device_kind})"
        )
    groups = [devices[i * tensor_parallel : (i + 1) * tensor_parallel] for i in range(pipeline_parallel)]
    return tuple(_part(config, i, pipeline_parallel, group) for i, group in enumerate(groups))


def one_stage(
    config: ModelConfig,
    devices: Sequence[Device],
    stage: int,
    *,
    pipeline_parallel: int,
    tensor_parallel: int = 1,
) -> StagePart:
    """One of the stages, counted from 0, on the first `tensor_parallel` devices of its own process.

    Raises ConfigError as `split_model`.
    """
    check_split(config, pipeline_parallel=pipeline_parallel, tensor_parallel=tensor_parallel)
    if tensor_parallel > len(devices):
        raise ConfigError(
            f"tensor_parallel {tensor_parallel} needs as many devices in the worker's process; JAX has "
            f"{len(devices)} there ({devices[0].device_kind})"
        )
    return _part(config, stage, pipeline_parallel, devices[:tensor_parallel])


def _part(config: ModelConfig, stage: int, n_stages: int, devices: Sequence[Device]) -> StagePart:
    return StagePart(
        stage_layers(config.n_layers, n_stages)[stage],
        DeviceGroup(tuple(devices)),
        first=stage == 0,
        last=stage == n_stages - 1,
    )
