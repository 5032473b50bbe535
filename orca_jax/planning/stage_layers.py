"""The split of a model's layers into stages (ORCA 4.1, Figure 6: inter- and intra-layer parallelism)."""

from functools import lru_cache

from orca_jax.config import ParallelConfig
from orca_jax.errors import ConfigError, UnevenBlocks
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.packed_form import PackedForm
from orca_jax.families.parameters import Parameter, parameter_table
from orca_jax.planning.expert_exchange import exchangeable


def stage_layers(n_layers: int, n_stages: int) -> list[range]:
    """Split the layers evenly; the first stages get the remaining layers, one each.

    The last stage also has the head, so it is the last to get one more.
    """
    each, over = divmod(n_layers, n_stages)
    stops = [each * (i + 1) + min(i + 1, over) for i in range(n_stages)]
    return [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def check_split(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError if the model cannot be split into these stages, each over these devices."""
    n_stages, n_devices = parallel.pipeline_parallel, parallel.tensor_parallel
    if n_stages > config.n_layers:
        raise ConfigError(
            f"pipeline_parallel is {n_stages}, but the model's n_layers is {config.n_layers}; each stage "
            "needs at least one layer"
        )
    _check_shared(config, n_stages)
    problem = _uneven(config, n_devices)
    if problem is not None:
        raise ConfigError(
            f"tensor_parallel is {n_devices}, but the model's {problem} is not a multiple of it; "
            f"{', '.join(map(str, tensor_degrees(config, config.n_heads)))} split it evenly"
        )
    problem = _uneven_blocks(config, n_devices)
    if problem is not None:
        raise UnevenBlocks(
            f"tensor_parallel is {n_devices}, but {problem}; "
            f"{', '.join(map(str, tensor_degrees(config, config.n_heads)))} split the model at whole blocks"
        )
    if parallel.expert_exchange == "exchange" and not any(
        exchangeable(layer, n_devices) for layer in config.layers
    ):
        raise ConfigError(
            f"expert_exchange is 'exchange', but with tensor_parallel {n_devices} no layer of this model can "
            "exchange tokens: each of several devices must have whole experts, and there must be no shared "
            "expert (docs/experts.md); use gather or auto"
        )


def _check_shared(config: ModelConfig, n_stages: int) -> None:
    """Raise ConfigError where stages would need what an earlier stage alone has."""
    if n_stages > 1 and config.input_size is not None:
        raise ConfigError(
            f"pipeline_parallel is {n_stages}, and the model's layers have inputs of their own, which the "
            "first stage alone has; use pipeline_parallel=1, with tensor_parallel for more devices"
        )
    for layers in stage_layers(config.n_layers, n_stages):
        for i in layers:
            if config.memory_of(i) < layers.start:
                raise ConfigError(
                    f"pipeline_parallel is {n_stages}, and layer {i} takes the keys and values of layer "
                    f"{config.memory_of(i)}, which would be on an earlier stage; use fewer stages"
                )
            if config.selection_of(i) < layers.start:
                raise ConfigError(
                    f"pipeline_parallel is {n_stages}, and layer {i} takes the keys that layer "
                    f"{config.selection_of(i)} selects, which would be on an earlier stage; use fewer stages"
                )


def tensor_degrees(config: ModelConfig, most: int) -> list[int]:
    """The numbers of devices, up to `most`, over which the model's layers can be split."""
    return [n for n in range(1, most + 1) if _uneven(config, n) is None and _uneven_blocks(config, n) is None]


def _uneven(config: ModelConfig, n_devices: int) -> str | None:
    """A size of the model that `n_devices` devices cannot share evenly; None if there is none."""
    if config.n_heads % n_devices:
        return f"n_heads {config.n_heads}"
    for each in config.feed_forwards:
        experts = each.experts
        if experts is not None and experts.packed and experts.number % n_devices:
            return f"n_experts {experts.number}, of which each device has whole packed ones,"
        if each.size % n_devices and (experts is None or experts.number % n_devices):
            return f"ffn_size {each.size}" + (f", or its n_experts {experts.number}," if experts else "")
        if experts is not None and experts.shared_size is not None and experts.shared_size % n_devices:
            return f"shared_size {experts.shared_size}"
    return None


def _uneven_blocks(config: ModelConfig, n_devices: int) -> str | None:
    """A weight whose inputs `n_devices` devices cannot share at whole blocks; None if there is none."""
    for one, name in _packed_weights(config).items():
        n_in, multiple = one.shape[-1], one.form.multiple
        is_split = one.split_axis(n_devices) == len(one.shape) - 1
        if n_devices > 1 and is_split and _is_ordered(one):
            return f"the inputs of {name} are in an order of their own (GPTQ's act-order), and stay together"
        if is_split and n_in % (n_devices * multiple):
            return (
                f"the {n_in} inputs of {name} are packed in blocks of {multiple}, of which each device needs "
                "the same number"
            )
    return None


@lru_cache(maxsize=64)
def _packed_weights(config: ModelConfig) -> dict[Parameter, str]:
    """The distinct weights with inputs in blocks or in an order of their own, by the first name of each."""
    found: dict[Parameter, str] = {}
    for name, one in parameter_table(config).items() if config.weight_forms else ():
        if one.form.multiple > 1 or _is_ordered(one):
            found.setdefault(one, name)
    return found


def _is_ordered(parameter: Parameter) -> bool:
    return isinstance(parameter.form, PackedForm) and parameter.form.ordered


def split_summary(n_layers: int, parallel: ParallelConfig) -> str:
    """Describe the split in one line."""
    n_stages, n_devices = parallel.pipeline_parallel, parallel.tensor_parallel
    stages = "1 stage" if n_stages == 1 else f"{n_stages} stages"
    devices = "1 device" if n_devices == 1 else f"{n_devices} devices"
    if n_stages == 1:
        return f"{stages} on {devices}"
    each = [len(layers) for layers in stage_layers(n_layers, n_stages)]
    counts = str(each[0]) if len(set(each)) == 1 else ", ".join(map(str, each))
    return f"{stages} of {counts} layers, {devices} each"
