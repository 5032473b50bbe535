"""Which layers each stage has (ORCA 4.1, Figure 6: inter-layer and intra-layer parallelism)."""

import math

from orca_jax.config import ParallelConfig
from orca_jax.errors import ConfigError
from orca_jax.families.model_config import ModelConfig


def stage_layers(n_layers: int, n_stages: int) -> list[range]:
    """The same number of layers for each stage; where that leaves some over, one more for the first ones.

    The last stage has the head as well, so it is the last to get one more.
    """
    each, over = divmod(n_layers, n_stages)
    stops = [each * (i + 1) + min(i + 1, over) for i in range(n_stages)]
    return [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def check_split(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Whether the model can be cut into so many stages, each over so many devices. Raises ConfigError."""
    n_stages, n_devices = parallel.pipeline_parallel, parallel.tensor_parallel
    if n_stages > config.n_layers:
        raise ConfigError(
            f"pipeline_parallel is {n_stages}, and the model's n_layers is {config.n_layers}; each stage "
            "needs a layer"
        )
    for name, value in (("n_heads", config.n_heads), *(("ffn_size", size) for size in config.ffn_sizes)):
        if value % n_devices:
            raise ConfigError(
                f"tensor_parallel is {n_devices}, and the model's {name} {value} is no multiple of it; "
                f"{_divisors(config)} split it evenly"
            )


def split_summary(n_layers: int, parallel: ParallelConfig) -> str:
    """A line that says how a model is split."""
    n_stages, n_devices = parallel.pipeline_parallel, parallel.tensor_parallel
    stages = "1 stage" if n_stages == 1 else f"{n_stages} stages"
    devices = "1 device" if n_devices == 1 else f"{n_devices} devices"
    if n_stages == 1:
        return f"{stages} on {devices}"
    each = [len(layers) for layers in stage_layers(n_layers, n_stages)]
    counts = str(each[0]) if len(set(each)) == 1 else ", ".join(map(str, each))
    return f"{stages} of {counts} layers, {devices} each"


def _divisors(config: ModelConfig) -> str:
    common = math.gcd(config.n_heads, *config.ffn_sizes)
    return ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
