# pyright: standard
"""Finds a user's model, and puts its weights onto an engine's devices."""

import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from orca_jax.checks import named_object
from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError
from orca_jax.families.attention_config import Attention
from orca_jax.families.model_config import Embedding, FeedForward, Layer, ModelConfig
from orca_jax.model_files.found_model import (
    FoundModel,
    check_rounded,
    find_model,
    is_function,
    with_kv_cache,
    with_tokenizer,
)
from orca_jax.planning.cost_model import parameter_count
from orca_jax.planning.stage_layers import stage_layers
from orca_jax.sharding.device_group import TENSOR
from orca_jax.sharding.partition import StagePart
from orca_jax.user_model.decoder import ModuleShapes, UserDecoder, UserParameters, try_once

_SIZES = ("vocab_size", "n_positions", "hidden_size", "n_heads", "n_kv_heads", "head_size")


def find_any_model(config: EngineConfig, *, shapes_only: bool = False) -> FoundModel:
    """Find the model of `config`: a name or directory as in `find_model`, or a UserModel.

    A UserModel is the module itself, or "package.file:function" for a function that makes it. With
    `shapes_only` its weights may be ShapeDtypeStructs. Raises ConfigError or a CheckpointError.
    """
    model: Any = config.model
    if is_function(model):
        model = _make(model, shapes_only=shapes_only)
    if model is None or isinstance(model, str | Path):
        return find_model(
            model,
            config.load_format,
            config.generation_config,
            config.tokenizer,
            config.quantization,
            config.kv_cache_dtype,
            config.pooling,
        )
    _check(model)
    check_rounded(config)
    shape = with_kv_cache(_config(model), config.kv_cache_dtype)
    found = FoundModel(type(model).__name__, shape, None, None, user_model=model, pooling=config.pooling)
    tokenizer = config.tokenizer or getattr(model, "tokenizer", None)
    return found if tokenizer is None else with_tokenizer(found, tokenizer)


def count_parameters(found: FoundModel) -> int:
    """Count the model's weights."""
    if found.user_model is None:
        return parameter_count(found.config)
    return sum(weight.size for weight in jax.tree.leaves(nnx.state(found.user_model, nnx.Param)))


def user_stages(
    model: Any, config: ModelConfig, parts: Sequence[StagePart], dtype: jnp.dtype
) -> list[UserParameters]:
    """Put the weights of each stage on its devices, floating-point ones in `dtype`. Raises ConfigError."""
    n_devices = len(parts[0].group)
    if config.n_kv_heads % n_devices:
        raise ConfigError(
            f"tensor_parallel is {n_devices}, and the model has {config.n_kv_heads} key/value heads, which "
            "must be a multiple of it"
        )
    rest = _without_layers(model)
    return [_stage(model, rest if part.first or part.last else None, config, part, dtype) for part in parts]


def module_shapes(model: Any, config: ModelConfig, n_stages: int, dtype: jnp.dtype) -> ModuleShapes:
    """The shapes of all weights as the stages of `user_stages` hold them."""
    held, optional = dict[str, jax.ShapeDtypeStruct](), set[str]()
    rest, stages = _without_layers(model), stage_layers(config.n_layers, n_stages)
    for layers in stages:
        around = rest if layers in (stages[0], stages[-1]) else None
        decoder = UserDecoder(config, [model.layers[i] for i in layers], around, None, dtype)
        for path, variable in nnx.to_flat_state(nnx.split(decoder)[1]):
            name, value = _name_in_model(path, layers[0]), variable.get_value()
            floating = jnp.issubdtype(value.dtype, jnp.floating)
            held[name] = jax.ShapeDtypeStruct(value.shape, dtype if floating else value.dtype)
            if not isinstance(variable, nnx.Param):
                optional.add(name)
    return ModuleShapes(held, frozenset(optional))


def _without_layers(model: Any) -> Any:
    rest = nnx.clone(model)
    rest.layers = nnx.List([])
    return rest


def _stage(
    model: Any, rest: nnx.Module | None, config: ModelConfig, part: StagePart, dtype: jnp.dtype
) -> UserParameters:
    group = part.group
    layers = [model.layers[i] for i in part.layers]
    mesh = group.mesh if len(group) > 1 else None
    decoder = UserDecoder(config, layers, rest, mesh, dtype)
    graph, state = nnx.split(decoder)
    # Specs are in the module's metadata; a weight without one is whole on every device.
    specs = dict(nnx.to_flat_state(nnx.get_partition_spec(state)))
    placed: dict[str, jax.Array] = {}
    variables: list[tuple[Any, Any]] = []
    names: list[tuple[Any, Any]] = []
    for path, variable in nnx.to_flat_state(state):
        name, value = _name_in_model(path, part.layers[0]), variable[...]
        names.append((path, variable.replace(name)))
        spec = _spec(name, specs[path].get_value(), value.shape, len(group))
        if jnp.issubdtype(value.dtype, jnp.floating):
            value = value.astype(dtype)
        placed[name] = jax.device_put(value, group.place(spec))
        variables.append((path, variable.replace(placed[name])))  # the user's module is unchanged
    decoder = nnx.merge(graph, nnx.from_flat_state(variables))
    ordered = jax.tree.leaves(nnx.from_flat_state(names))
    return UserParameters(decoder, placed, ordered)


def _name_in_model(path: Sequence[Any], first_layer: int) -> str:
    """Turn a path in a UserDecoder into the weight's path in the user's model, joined by dots."""
    kind, *inside = path
    if kind == "layers":
        return _joined((kind, first_layer + inside[0], *inside[1:]))
    return _joined(inside)  # without "rest"


def _joined(path: Sequence[Any]) -> str:
    # A tree of functions that is one array has no name.
    return ".".join(str(key) for key in path if key != "")


def _spec(name: str, spec: Any, shape: tuple[int, ...], n_devices: int) -> PartitionSpec:
    """Reduce a weight's spec to tensor parallelism: axes of other names are not split."""
    axes = tuple(spec) if isinstance(spec, PartitionSpec) else ()
    split = [
        TENSOR if axis == TENSOR or (isinstance(axis, tuple) and TENSOR in axis) else None for axis in axes
    ]
    for axis, size in zip(split, shape, strict=False):
        if axis is not None and size % n_devices:
            raise ConfigError(
                f"tensor_parallel is {n_devices}, but the spec {spec} of the weight {name} {shape} splits "
                f"{size} elements, which must be a multiple of it"
            )
    return PartitionSpec(*split)


def _make(place: str, *, shapes_only: bool) -> Any:
    """Call the function "package.file:function", perhaps in the working directory, which makes a model.

    With `shapes_only` it is traced where it can be, so that this process uses no device.
    """
    make = named_object("model", place)
    if not callable(make):
        raise ConfigError(f"model is {place!r}, which is not a function; name a function that makes a model")
    if shapes_only:
        try:
            return nnx.eval_shape(make)
        except jax.errors.JAXTypeError:
            pass  # it looks at numbers, as when it trains
    return make()


def _check(model: Any) -> None:
    """Raise ConfigError unless it is a UserModel."""
    kind, is_module = type(model).__name__, isinstance(model, nnx.Module)
    if not is_module:
        raise ConfigError(
            f"model is {reprlib.repr(model)}; it must be a directory, a name, None for the demo model, or an "
            "nnx.Module (docs/training.md)"
        )
    for name in _SIZES:
        if not isinstance(getattr(model, name, None), int):
            raise ConfigError(f"the model {kind} has no whole number {name}; it needs {', '.join(_SIZES)}")
    for name in ("embed", "unembed"):
        if not callable(getattr(model, name, None)):
            raise ConfigError(f"the model {kind} has no method {name}")
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nnx.List) or not layers:
        raise ConfigError(f"the model {kind} has no nnx.List of layers")
    try_once(model)


def _config(model: Any) -> ModelConfig:
    """The shape for scheduler, caches and memory plan, with the widest feed-forward part."""
    multiple = -(-model.hidden_size // model.n_heads) * model.n_heads
    layer = Layer(
        attention=Attention(
            n_heads=model.n_heads,
            n_kv_heads=model.n_kv_heads,
            head_size=model.head_size,
            qkv_bias=False,
            out_bias=False,
        ),
        feed_forward=FeedForward(size=getattr(model, "ffn_size", 4 * multiple), bias=False),
    )
    return ModelConfig(
        vocab_size=model.vocab_size,
        n_positions=model.n_positions,
        hidden_size=model.hidden_size,
        layers=(layer,) * len(model.layers),
        embedding=Embedding(size=model.hidden_size),
        positions=None,
        final_norm=None,
        eos_token_ids=tuple(getattr(model, "eos_token_ids", ())),
    )
