# pyright: standard
"""New weights as a trainer hands them over: their names, shapes and dtypes, checked before any is used."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core.meta import AxisMetadata

from orca_jax.errors import TensorMismatch
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import in_layers, parameter_table
from orca_jax.families.trainers.array_form import ArrayForm, axis_sizes
from orca_jax.families.trainers.layouts import Detected, Layout, detect
from orca_jax.launch.trainers_arrays import Rearranged
from orca_jax.model.gpt import GPT

LORA_A, LORA_B = ".lora_a", ".lora_b"

_SHOWN = 4  # differences in a message


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank change of one weight [*out, *into]: `b` [*out, r] times `a` [r, *into]."""

    a: Any
    b: Any


def named_arrays(weights: object) -> dict[str, Any]:
    """The arrays of a dict, an nnx.State or an nnx.Module, by their path with dots. Raises TensorMismatch."""
    if isinstance(weights, nnx.Module):
        weights = nnx.state(weights, nnx.Param)
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


def check_arrays(
    arrays: Mapping[str, Any],
    stored: ModelConfig,
    dtype: jnp.dtype,
    *,
    cast: bool,
    layout: Layout | None = None,
) -> dict[str, Callable[[], Any]]:
    """All weights of the model by name, each made when it is called.

    The arrays have our names, or those of the model's own nnx.State, or a trainer's: that of `layout`, or the
    one whose names they are. `stored` is the model without padding. With `cast` every floating dtype is
    allowed. Raises TensorMismatch, which names what is missing, left over or different; UnsupportedModel
    where the trainer has no such model.
    """
    table = parameter_table(stored)
    if layout is not None or not table.keys() <= arrays.keys():
        detected = detect(stored, arrays)
        if layout is not None and (detected is None or detected.layout != layout):
            found = "no trainer's" if detected is None else f"those of {detected.layout}"
            raise TensorMismatch(f"the new weights have not the names of {layout}: they are {found}")
        if detected is not None:
            return _of_trainer(arrays, stored, dtype, detected, cast=cast)
    paths = state_names(stored) if arrays.keys() - table.keys() else {}
    named = {paths.get(name, name): value for name, value in arrays.items()}
    wrong = _absent(table, named)
    for name, value in named.items():
        if name in table:
            wrong += _differences(name, value, table[name].shape, dtype, cast=cast)
    _raise(wrong)
    return {name: partial(_as_it_is, value) for name, value in named.items()}


def _of_trainer(
    arrays: Mapping[str, Any], model: ModelConfig, dtype: jnp.dtype, detected: Detected, *, cast: bool
) -> dict[str, Callable[[], Any]]:
    table = parameter_table(model)
    expected = dict.fromkeys(name for stored in detected.names.values() for name in stored.names)
    wrong = _absent(expected, arrays)
    made = dict[str, Callable[[], Any]]()
    for name, parameter in table.items():
        stored = detected.names[name]
        if not all(theirs in arrays for theirs in stored.names):
            continue
        values = tuple(arrays[theirs] for theirs in stored.names)
        sizes = axis_sizes(model, int(in_layers(name)[1] or 0))
        forms = list[ArrayForm]()
        for theirs, value, form in zip(stored.names, values, stored.forms, strict=True):
            shape = tuple(getattr(value, "shape", ()))
            form = form.fitting(shape, sizes)
            expected_shape = shape if form.fits(shape, sizes) else form.shape(sizes)
            wrong += _differences(theirs, value, expected_shape, dtype, cast=cast)
            forms.append(form)
        places = {frozenset(value.devices()) for value in values if isinstance(value, jax.Array)}
        if len(places) > 1:
            wrong.append(f"{' and '.join(dict.fromkeys(stored.names))} are on different devices")
        stored = replace(stored, forms=tuple(forms))
        made[name] = Rearranged(values, stored, parameter, sizes, model.attention)
    _raise([*dict.fromkeys(wrong)])  # an array of several layers is looked at for each
    return made


def _absent(expected: Mapping[str, object], found: Mapping[str, object]) -> list[str]:
    wrong = [f"{name} is missing" for name in expected if name not in found]
    return wrong + [f"{name} is not a weight of this model" for name in found if name not in expected]


def _as_it_is(value: Any) -> Any:
    return value


def check_adapters(arrays: Mapping[str, Any], stored: ModelConfig) -> dict[str, Adapter] | None:
    """The adapters by the name of their weight, if all names end in .lora_a or .lora_b; else None.

    Raises TensorMismatch.
    """
    ends = {name: next((end for end in (LORA_A, LORA_B) if name.endswith(end)), None) for name in arrays}
    if not any(ends.values()):
        return None
    table, paths = parameter_table(stored), state_names(stored)
    pairs = dict[str, dict[str, Any]]()
    wrong = list[str]()
    for name, end in ends.items():
        if end is None:
            wrong.append(f"{name} is no {LORA_A} or {LORA_B}; give either whole weights or adapters")
            continue
        own = name.removesuffix(end)
        pairs.setdefault(paths.get(own, own), {})[end] = arrays[name]
    adapters = dict[str, Adapter]()
    for name, pair in pairs.items():
        if name not in table:
            wrong.append(f"{name} is not a weight of this model")
        elif len(pair) < 2:
            wrong.append(f"{name} has no {LORA_B if LORA_A in pair else LORA_A}")
        else:
            adapters[name] = Adapter(pair[LORA_A], pair[LORA_B])
            wrong += _adapter_differences(name, adapters[name], table[name].shape)
    _raise(wrong)
    return adapters


def state_names(stored: ModelConfig) -> dict[str, str]:
    """The name of each weight by its path in the state of the model's nnx module."""
    marks: Any = {
        name: jax.ShapeDtypeStruct(one.shape, jnp.float32) for name, one in parameter_table(stored).items()
    }
    name_of = {id(mark): name for name, mark in marks.items()}
    state = nnx.state(GPT(stored, marks))
    return {path: name_of[id(mark)] for path, mark in _leaves(state, "")}


def _leaves(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, nnx.Variable):
            value = value.get_value()
        elif isinstance(value, AxisMetadata):  # as Linen's modules hold weights with their axes' names
            value = value.unbox()
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


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


def _adapter_differences(name: str, adapter: Adapter, shape: tuple[int, ...]) -> Iterator[str]:
    for end, value in ((LORA_A, adapter.a), (LORA_B, adapter.b)):
        wrong = _no_array(name + end, value)
        if wrong is None and not jnp.issubdtype(value.dtype, jnp.floating):
            wrong = f"{name}{end} has the dtype {value.dtype}, which is not floating"
        if wrong is not None:
            yield wrong
            return
    a, b = tuple(adapter.a.shape), tuple(adapter.b.shape)
    if not a or not b or a[0] != b[-1] or b[:-1] + a[1:] != shape or len(a) < 2 or len(b) < 2:
        yield (
            f"{name}{LORA_B} {list(b)} times {LORA_A} {list(a)} is not the weight's shape {list(shape)}; "
            f"{LORA_B} has its output axes, then the rank, {LORA_A} the rank, then its input axes"
        )


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
