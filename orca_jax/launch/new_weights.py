# pyright: standard
"""Checks new weights from a trainer before any is used: their names, shapes and dtypes."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core.meta import AxisMetadata

from orca_jax.config import Layout
from orca_jax.errors import ConfigError, TensorMismatch
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import Parameter, attention_of, parameter_table
from orca_jax.families.stored_name import StoredName
from orca_jax.families.trainers.array_form import ArrayForm, axis_sizes
from orca_jax.families.trainers.layouts import Detected, detect, held_names
from orca_jax.launch.trainers_arrays import AdaptersChange, Rearranged, Recipe, product_of
from orca_jax.model.transformer import Transformer

LORA_A, LORA_B = ".lora_a", ".lora_b"
_LORA_ENDS = (LORA_A, LORA_B, "_lora_a", "_lora_b")

_SHOWN = 4  # differences in a message


Change = Callable[[Sequence[jax.Array]], jax.Array]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank change of one weight: `change(arrays)` computes it in float32, and is traced."""

    arrays: tuple[Any, ...]
    change: Change


def named_arrays(weights: object) -> dict[str, Any]:
    """The arrays of a dict, an nnx.State, an nnx.Module or another pytree, by dotted path.

    A module of Equinox or Haliax is such a pytree. Raises TensorMismatch.
    """
    if isinstance(weights, nnx.Module):
        weights = nnx.state(weights, nnx.Param)
    if not isinstance(weights, Mapping | list | tuple | None) and not jax.tree_util.all_leaves([weights]):
        paths, _ = jax.tree_util.tree_flatten_with_path(weights)
        weights = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}
    if not isinstance(weights, Mapping):
        raise TensorMismatch(
            f"the new weights are a {type(weights).__name__}; give a dict of arrays by name, an nnx.State or "
            "nnx.Module, or the directory of a checkpoint"
        )
    arrays = dict[str, Any]()
    for name, value in _leaves(weights, ""):
        if name in arrays:
            raise TensorMismatch(f"two of the new weights have the name {name}")
        arrays[name] = value
    return arrays


def check_replaceable(model: ModelConfig) -> None:
    """Raise ConfigError for a model whose weights cannot be replaced."""
    if model.fixed_weights is not None:
        raise ConfigError(model.fixed_weights)


def check_arrays(
    arrays: Mapping[str, Any],
    stored: ModelConfig,
    dtype: jnp.dtype,
    *,
    cast: bool,
    layout: Layout | None = None,
) -> dict[str, Callable[[], Any]]:
    """All weights of the model by name, as functions that make them.

    The names of `arrays` are ours, those of the model's nnx.State, or a trainer's, which is `layout` or is
    detected. `stored` is the model without padding. With `cast` every floating dtype is allowed. Raises
    TensorMismatch, which names what is missing, left over or different, and UnsupportedModel if the trainer
    has no such model.
    """
    table = parameter_table(stored)
    if layout is not None or not table.keys() <= arrays.keys():
        detected = detect(stored, arrays)
        if layout is not None and (detected is None or detected.layout != layout):
            found = "no trainer's" if detected is None else f"those of {detected.layout}"
            raise TensorMismatch(f"the new weights are not in the layout {layout}: their names are {found}")
        if detected is not None:
            return _of_trainer(arrays, stored, dtype, detected, cast=cast)
    paths = state_names(stored) if arrays.keys() - table.keys() else {}
    named = {paths.get(name, name): value for name, value in arrays.items()}
    wrong = _absent(table, named)
    for name, value in named.items():
        if name in table:
            wrong += _differences(name, value, table[name].shape, table[name].dense_dtype(dtype), cast=cast)
    _raise(wrong)
    return {name: lambda value=value: value for name, value in named.items()}


def check_module_arrays(
    arrays: Mapping[str, Any],
    held: Mapping[str, jax.ShapeDtypeStruct],
    *,
    optional: Collection[str],
    cast: bool,
) -> dict[str, Any]:
    """New arrays for a module that a user wrote, by their paths in it.

    `held` has the shapes and dtypes of the engine's weights; those in `optional` may be left out. Raises
    TensorMismatch.
    """
    wrong = _absent(held, {**dict.fromkeys(optional), **arrays})
    for name, value in arrays.items():
        if name in held:
            wrong += _differences(name, value, held[name].shape, held[name].dtype, cast=cast)
    _raise(wrong)
    return dict(arrays)


def _of_trainer(
    arrays: Mapping[str, Any], model: ModelConfig, dtype: jnp.dtype, detected: Detected, *, cast: bool
) -> dict[str, Callable[[], Any]]:
    table = parameter_table(model)
    expected = dict.fromkeys(name for stored in detected.names.values() for name in stored.names)
    wrong = _absent(expected, {name: None for name in arrays if name not in detected.unused})
    made = dict[str, Callable[[], Any]]()
    for name, parameter in table.items():
        stored = detected.names[name]
        if not all(tensor_name in arrays for tensor_name in stored.names):
            continue
        values = tuple(arrays[tensor_name] for tensor_name in stored.names)
        sizes = axis_sizes(model, name)
        forms = list[ArrayForm]()
        for tensor_name, value, form in zip(stored.names, values, stored.forms, strict=True):
            shape = tuple(getattr(value, "shape", ()))
            form = form.fitting(shape, sizes)
            expected_shape = shape if form.fits(shape, sizes) else form.shape(sizes)
            wrong += _differences(tensor_name, value, expected_shape, parameter.dense_dtype(dtype), cast=cast)
            forms.append(form)
        places = {frozenset(value.devices()) for value in values if isinstance(value, jax.Array)}
        if len(places) > 1:
            wrong.append(f"{' and '.join(dict.fromkeys(stored.names))} are on different devices")
        made[name] = Rearranged(values, _recipe(stored, forms, name, parameter, model))
    _raise([*dict.fromkeys(wrong)])  # an array of several layers is checked once for each
    return made


def _recipe(
    stored: StoredName, forms: Sequence[ArrayForm], name: str, parameter: Parameter, model: ModelConfig
) -> Recipe:
    sizes = axis_sizes(model, name)
    return Recipe(tuple(forms), stored.heads, parameter, tuple(sizes.items()), attention_of(model, name))


def _absent(expected: Mapping[str, object], found: Mapping[str, object]) -> list[str]:
    wrong = [f"{name} is missing" for name in expected if name not in found]
    return wrong + [f"{name} is not a weight of this model" for name in found if name not in expected]


def check_adapters(
    arrays: Mapping[str, Any], stored: ModelConfig, layout: Layout | None = None
) -> dict[str, Adapter] | None:
    """The adapters by the name of their weight, if names end in .lora_a or .lora_b; else None.

    In Tunix's layout they end in _lora_a and _lora_b, as Qwix names them. Raises TensorMismatch.
    """
    ends = {name: next((end for end in _LORA_ENDS if name.endswith(end)), None) for name in arrays}
    if not any(ends.values()):
        return None
    wrong = [
        f"{name} is no {LORA_A} or {LORA_B}; give either whole weights or adapters"
        for name, end in ends.items()
        if end is None
    ]
    pairs = dict[str, dict[str, Any]]()
    for name, end in ends.items():
        if end is not None:
            pairs.setdefault(name.removesuffix(end), {})[end[1:]] = arrays[name]
    own = any(name.endswith((LORA_A, LORA_B)) for name in arrays)
    if layout not in (None, "tunix") or (own and layout is not None):
        raise TensorMismatch(f"the new weights are adapters, which the layout {layout} does not have")
    adapters = _named_adapters(pairs, stored, wrong) if own else _tunix_adapters(pairs, stored, wrong)
    _raise(wrong)
    return adapters


def adapted_weights(names: Collection[str], stored: ModelConfig) -> dict[str, str]:
    """The name of the weight that each array adapts; `check_adapters` has accepted the arrays."""
    if any(name.endswith((LORA_A, LORA_B)) for name in names):
        known = state_names(stored)
    else:
        held = held_names(stored, "tunix")
        known = {tensor_name: name for name, one in held.items() for tensor_name in one.names}
    bases = {name: name.removesuffix(next(end for end in _LORA_ENDS if name.endswith(end))) for name in names}
    return {name: known.get(base, base) for name, base in bases.items()}


def _named_adapters(
    pairs: Mapping[str, Mapping[str, Any]], stored: ModelConfig, wrong: list[str]
) -> dict[str, Adapter]:
    """Adapters of weights [*out, *into]: b [*out, r] times a [r, *into]."""
    table, paths = parameter_table(stored), state_names(stored)
    adapters = dict[str, Adapter]()
    for given, pair in pairs.items():
        name = paths.get(given, given)
        both = _both(given, pair, LORA_A[0], table, name, wrong)
        if both is None:
            continue
        a, b = both
        shape, into, out = table[name].shape, tuple(a.shape[1:]), tuple(b.shape[:-1])
        if not (into and out) or a.shape[0] != b.shape[-1] or (*out, *into) != shape:
            wrong.append(
                f"{given}{LORA_B} {list(b.shape)} times {LORA_A} {list(a.shape)} is not the weight's shape "
                f"{list(shape)}; {LORA_B} has its output axes, then the rank, {LORA_A} the rank, then its "
                "input axes"
            )
        adapters[name] = Adapter((b, a), _product)
    return adapters


def _product(arrays: Sequence[jax.Array]) -> jax.Array:
    return product_of(*arrays)


def _tunix_adapters(
    pairs: Mapping[str, Mapping[str, Any]], model: ModelConfig, wrong: list[str]
) -> dict[str, Adapter]:
    names = held_names(model, "tunix")
    table = parameter_table(model)
    ours = {tensor_name: name for name, stored in names.items() for tensor_name in stored.names}
    found = dict[str, tuple[Any, Any]]()
    for tensor_name, pair in pairs.items():
        both = _both(tensor_name, pair, "_", ours, tensor_name, wrong)
        if both is not None:
            found[tensor_name] = both
    adapters = dict[str, Adapter]()
    for name in dict.fromkeys(ours[tensor_name] for tensor_name in found):
        stored = names[name]
        recipe = _recipe(stored, stored.forms, name, table[name], model)
        for i, tensor_name in enumerate(stored.names):
            if tensor_name in found:
                wrong += _pair_differences(tensor_name, *found[tensor_name], recipe, i)
        adapted = tuple(tensor_name in found for tensor_name in stored.names)
        arrays = tuple(array for tensor_name in stored.names for array in found.get(tensor_name, ()))
        adapters[name] = Adapter(arrays, AdaptersChange(recipe, adapted))
    return adapters


def _both(
    given: str,
    pair: Mapping[str, Any],
    joint: str,
    known: Collection[str],
    name: str,
    wrong: list[str],
) -> tuple[Any, Any] | None:
    """The two arrays of an adapter; None if they are unusable, which `wrong` then explains."""
    if name not in known:
        wrong.append(f"{given} is not a weight of this model")
        return None
    before = len(wrong)
    for end in ("lora_a", "lora_b"):
        if end not in pair:
            wrong.append(f"{given} has no {joint}{end}")
            continue
        value = pair[end]
        no_array = _no_array(f"{given}{joint}{end}", value)
        if no_array is None and not jnp.issubdtype(value.dtype, jnp.floating):
            no_array = f"{given}{joint}{end} has the dtype {value.dtype}, which is not floating"
        if no_array is not None:
            wrong.append(no_array)
    return (pair["lora_a"], pair["lora_b"]) if len(wrong) == before else None


def _pair_differences(tensor_name: str, a: Any, b: Any, recipe: Recipe, i: int) -> Iterator[str]:
    shape, (into, out) = recipe.shape(i), recipe.into_and_out(i)
    n_into, n_out = (math.prod(shape[axis] for axis in axes) for axes in (into, out))
    ranks = {*a.shape[-1:], *b.shape[:1]}
    if not into or len(ranks) != 1 or (math.prod(a.shape[:-1]), math.prod(b.shape[1:])) != (n_into, n_out):
        yield (
            f"{tensor_name}_lora_a {list(a.shape)} times _lora_b {list(b.shape)} does not have the array's "
            f"shape {list(shape)}"
        )


def state_names(stored: ModelConfig) -> dict[str, str]:
    """The name of each weight by its path in the state of the model's nnx module."""
    marks: Any = {
        name: jax.ShapeDtypeStruct(one.shape, jnp.float32) for name, one in parameter_table(stored).items()
    }
    name_of = {id(mark): name for name, mark in marks.items()}
    state = nnx.state(Transformer(stored, marks))
    return {path: name_of[id(mark)] for path, mark in _leaves(state, "")}


def _leaves(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, nnx.Variable):
            value = value.get_value()
        elif isinstance(value, AxisMetadata):  # as Linen's modules hold weights with their axes' names
            value = value.unbox()
        if isinstance(value, list | tuple) and not all(isinstance(each, int | float) for each in value):
            value = dict(enumerate(value))  # layers of plain functions
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}.")
        elif value is None or isinstance(value, list | tuple):
            yield name, value
        else:  # an array, or any other pytree of plain functions, such as a module of Equinox
            for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
                inside = jax.tree_util.keystr(path, simple=True, separator=".")
                yield f"{name}.{inside}" if inside else name, leaf


def _differences(
    name: str, value: Any, shape: tuple[int, ...], dtype: jnp.dtype, *, cast: bool
) -> Iterator[str]:
    wrong = _no_array(name, value)
    if wrong is not None:
        yield wrong
        return
    if tuple(value.shape) != shape:
        yield f"{name} has the shape {list(value.shape)}, expected {list(shape)}"
    if value.dtype != dtype and not (cast and jnp.issubdtype(value.dtype, jnp.floating)):
        hint = "; cast=True converts it" if jnp.issubdtype(value.dtype, jnp.floating) else ""
        yield f"{name} has the dtype {value.dtype}, expected {dtype}{hint}"


def _no_array(name: str, value: Any) -> str | None:
    if not isinstance(value, jax.Array | np.ndarray):
        return f"{name} is a {type(value).__name__}, not an array"
    if isinstance(value, jax.Array) and value.is_deleted():
        return f"{name} has been deleted, for example because it was donated to a program"
    return None


def _raise(wrong: list[str]) -> None:
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise TensorMismatch(f"the new weights do not fit: {'; '.join(wrong[:_SHOWN])}{more}")
