"""Which layers and devices each stage has (ORCA 4.1, Figure 6: inter-layer and intra-layer parallelism)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from orca_jax.config import ModelConfig
from orca_jax.errors import ConfigError
from orca_jax.model.gpt import stage_parameters
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
        return {name: self.group.place(spec(name)) for name in stage_parameters(config, self.layers)}


def stage_layers(n_layers: int, n_stages: int) -> list[range]:
    """The same number of layers for each stage; where that leaves some over, one more for the first ones.

    The last stage has the head as well, so it is the last to get one more.
    """
    each, over = divmod(n_layers, n_stages)
    stops = [each * (i + 1) + min(i + 1, over) for i in range(n_stages)]
    return [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def split_model(
    config: ModelConfig, devices: Sequence[Device], *, pipeline_parallel: int = 1, tensor_parallel: int = 1
) -> tuple[StagePart, ...]:
    """Stages of `tensor_parallel` devices each, side by side in the order of `devices`; more are left alone.

    Raises ConfigError where the devices are too few or the model cannot be split so.
    """
    for name, value in (("pipeline_parallel", pipeline_parallel), ("tensor_parallel", tensor_parallel)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1024:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number from 1 to 1024")
    if pipeline_parallel > config.n_layers:
        raise ConfigError(
            f"pipeline_parallel is {pipeline_parallel}, and the model's n_layers is {config.n_layers}; each "
            "stage needs a layer"
        )
    for name, value in (("n_heads", config.n_heads), ("ffn_size", config.ffn_size)):
        if value % tensor_parallel:
            raise ConfigError(
                f"tensor_parallel is {tensor_parallel}, and the model's {name} {value} is no multiple of it; "
                f"{_divisors(config)} split it evenly"
            )
    n_needed = pipeline_parallel * tensor_parallel
    if n_needed > len(devices):
        raise ConfigError(
            f"pipeline_parallel {pipeline_parallel} times tensor_parallel {tensor_parallel} needs {n_needed} "
            f"devices; JAX has {len(devices)} ({devices[0].device_kind})"
        )
    layers = stage_layers(config.n_layers, pipeline_parallel)
    return tuple(
        StagePart(
            layers[i],
            DeviceGroup(tuple(devices[i * tensor_parallel : (i + 1) * tensor_parallel])),
            first=i == 0,
            last=i == pipeline_parallel - 1,
        )
        for i in range(pipeline_parallel)
    )


def said_of(parts: Sequence[StagePart]) -> str:
    """A line that says how the model is split."""
    n_layers = [len(part.layers) for part in parts]
    stages = "1 stage" if len(parts) == 1 else f"{len(parts)} stages"
    devices = "1 device" if len(parts[0].group) == 1 else f"{len(parts[0].group)} devices"
    if len(parts) == 1:
        return f"{stages} on {devices}"
    layers = str(n_layers[0]) if len(set(n_layers)) == 1 else ", ".join(map(str, n_layers))
    return f"{stages} of {layers} layers, {devices} each"


def _divisors(config: ModelConfig) -> str:
    common = math.gcd(config.n_heads, config.ffn_size)
    return ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
