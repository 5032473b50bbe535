"""Which layers each stage has (ORCA 4.1, Figure 6: inter-layer and intra-layer parallelism)."""

import math

from orca_jax.errors import ConfigError
from orca_jax.families.model_config import ModelConfig


def stage_layers(n_layers: int, n_stages: int) -> list[range]:
    """The same number of layers for each stage; where that leaves some over, one more for the first ones.

    The last stage has the head as well, so it is the last to get one more.
    """
    each, over = divmod(n_layers, n_stages)
    stops = [each * (i + 1) + min(i + 1, over) for i in range(n_stages)]
    return [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def check_split(config: ModelConfig, *, pipeline_parallel: int, tensor_parallel: int) -> None:
    """Whether the model can be cut into so many stages, each over so many devices. Raises ConfigError."""
    for name, value in (("pipeline_parallel", pipeline_parallel), ("tensor_parallel", tensor_parallel)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1024:  # pyright: ignore[reportUnnecessaryIsInstance]
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


def said_of_split(n_layers: int, n_stages: int, tensor_parallel: int) -> str:
    """A line that says how a model is split."""
    stages = "1 stage" if n_stages == 1 else f"{n_stages} stages"
    devices = "1 device" if tensor_parallel == 1 else f"{tensor_parallel} devices"
    if n_stages == 1:
        return f"{stages} on {devices}"
    each = [len(layers) for layers in stage_layers(n_layers, n_stages)]
    said = str(each[0]) if len(set(each)) == 1 else ", ".join(map(str, each))
    return f"{stages} of {said} layers, {devices} each"


def _divisors(config: ModelConfig) -> str:
    common = math.gcd(config.n_heads, config.ffn_size)
    return ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
