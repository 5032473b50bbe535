# pyright: standard
"""The weights and caches of an engine in this process, replaced or given back between iterations."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.checkpoint.directory import find_parameters, put_in_form, read_ahead
from orca_jax.checkpoint.safetensors_reader import StoredTensor, read_header
from orca_jax.checkpoint.shard_reader import Source
from orca_jax.config import Layout
from orca_jax.errors import ConfigError, CorruptFile, EngineError, TensorMismatch
from orca_jax.execution.stage import StageWeights
from orca_jax.execution.worker import Worker
from orca_jax.families.attention_config import Attention
from orca_jax.families.hf_config import read_hf_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.next_token import next_token_head
from orca_jax.families.parameters import Parameter, attention_of, parameter_table, share_rows
from orca_jax.families.stored_name import engine_order
from orca_jax.families.strict_json import read_object, shown
from orca_jax.families.weight_form import Dense
from orca_jax.host_memory import give_back
from orca_jax.launch.module_update import ModuleWeights
from orca_jax.launch.new_weights import (
    Adapter,
    Change,
    adapted_weights,
    check_adapters,
    check_arrays,
    check_replaceable,
    named_arrays,
)
from orca_jax.model_files.weight_files import SINGLE
from orca_jax.sharding.pieces import moved
from orca_jax.sharding.random_parameters import (
    parts_of_heads,
    parts_of_rows,
    with_flat_heads,
    with_repeated_heads,
)
from orca_jax.sharding.specs import in_form, place_of_dense
from orca_jax.user_model.decoder import ModuleShapes

# The file with the scale in a directory of adapters, next to the safetensors file of their arrays.
ADAPTERS_JSON = "adapters.json"
_MAX_JSON_BYTES = 1000

# Yields a new weight for each place. A place is a Sharding, or a FormedWeight of Shardings.
_New = Callable[[str, Sequence[Any]], Iterator[Any]]


class LocalMemory:
    """An EngineMemory for workers in this process.

    `stored` is the model as dense checkpoints have it, `model` as the devices hold it: with its vocabulary
    padded and K/V heads repeated. Weights are replaced one at a time, so an update needs the memory of one
    more weight. New arrays are copied, since their owner may donate them. The weights of a module that a user
    wrote are replaced by their paths in it, as it stores them; `module` has all of them, also those that are
    on other processes' stages.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        stored: ModelConfig,
        model: ModelConfig,
        dtype: jnp.dtype,
        module: ModuleShapes | None = None,
    ) -> None:
        self._workers = workers
        self._stages = [StageWeights(worker.stage) for worker in workers]
        self._stored = stored = stored.with_forms({})
        self._model = model
        self._dtype = dtype
        self._module = None if module is None else ModuleWeights(module)
        self._fits = _Fitting(stored, model, dtype)
        self._without_adapter: dict[str, np.ndarray] = {}  # of weights that have an adapter merged in
        self._has_caches = True

    def prepare(
        self, weights: object, *, cast: bool, lora_scale: float, layout: Layout | None = None
    ) -> Callable[[], None]:
        if self._module is not None:
            if isinstance(weights, str | Path):
                planes = self._module.found(Path(weights))
                return partial(self._replace, planes, partial(self._module.read, planes))
            made = self._module.checked(weights, cast=cast, layout=layout)
            return partial(self._replace, made, partial(self._module.placed, made))
        check_replaceable(self._model)
        if isinstance(weights, str | Path):
            parts = checked_directory(Path(weights), self._model)
            return partial(self._install, partial(self._read, parts))
        arrays = named_arrays(weights)
        adapters = check_adapters(arrays, self._stored, layout)
        if adapters is not None:
            self._check_dense(adapters)
            return partial(self._merge, adapters, lora_scale)
        made = check_arrays(arrays, self._stored, self._dtype, cast=cast, layout=layout)
        return partial(self._install, partial(self._convert, made))

    def read_ahead(self, directory: Path) -> Callable[[], None]:
        if self._module is not None:
            planes = self._module.read_ahead(self._module.found(directory))
            return partial(self._replace, planes, partial(self._module.read, planes))
        check_replaceable(self._model)
        table = parameter_table(self._model)
        read = {
            name: read_ahead(source, table[name], np.dtype(self._dtype))
            for name, source in checked_directory(directory, self._model).items()
            if self._stages_of(name)
        }
        return partial(self._install, partial(self._read, read))

    def release(self, level: int) -> None:
        if self._has_caches:
            for worker in self._workers:
                worker.release_caches()
            self._has_caches = False
        if level > 1:
            for stage in self._stages:
                stage.park()
        give_back()

    def restore(self) -> None:
        for stage in self._stages:
            stage.unpark()
        if not self._has_caches:
            for worker in self._workers:
                worker.renew()
            self._has_caches = True
        give_back()  # the copies of weights in host memory

    def share(self, name: str, weight: Any) -> None:
        """Hold another engine's weight in place of one's own.

        While that engine has it in host memory it is empty, and nothing is done; another call must follow
        `restore`.
        """
        for stage in self._stages_of(name):
            if jax.tree.leaves(weight):
                stage.replace(name, weight)

    def adapt(self, directory: Path | None) -> None:
        if directory is None:
            self._merge({}, 1.0)
            return
        scale = read_object(directory / ADAPTERS_JSON, _MAX_JSON_BYTES).get("scale")
        if not isinstance(scale, float):
            raise CorruptFile(f"{shown(directory / ADAPTERS_JSON)}: expected a scale, found {shown(scale)}")
        tensors = read_header(directory / SINGLE)
        weight_of = adapted_weights(tensors, self._stored)
        arrays = {
            name: _read_whole(tensor)
            for name, tensor in tensors.items()
            if any(weight_of[name] in stage for stage in self._stages)
        }
        self._merge(check_adapters(arrays, self._stored) or {}, scale)

    def _install(self, new: _New) -> None:
        self._replace(parameter_table(self._model), new)
        self._without_adapter.clear()

    def _check_dense(self, names: Iterable[str]) -> None:
        """Raise ConfigError unless these weights are dense: adapters are merged into no other form."""
        for name in names:
            form = parameter_table(self._model)[name].form
            if not isinstance(form, Dense):
                raise ConfigError(f"an adapter cannot be merged into {name}, which is held in {form}")

    def _merge(self, adapters: Mapping[str, Adapter], scale: float) -> None:
        """Add adapters to the original weights; adapters that are merged now are taken out."""
        names = dict.fromkeys((*self._without_adapter, *adapters))
        for name in names:
            if name not in self._without_adapter:
                self._without_adapter[name] = self._stages_of(name)[0].copy(name)

        def new(name: str, places: Sequence[jax.sharding.Sharding]) -> Iterator[jax.Array]:
            base, adapter = self._without_adapter[name], adapters.get(name)
            for place in places:
                array = jax.device_put(base, place, may_alias=False)
                yield array if adapter is None else self._fits.merged(name, array, adapter, scale)

        self._replace(names, new)
        for name in names.keys() - adapters.keys():
            del self._without_adapter[name]

    def _replace(self, names: Mapping[str, object], new: _New) -> None:
        """Replace these weights one by one, each on all stages that have it.

        This runs on a thread of its own: programs that convert weights are compiled on first use, and on the
        scheduler's thread `on_compile` may forbid that. No request waits for them.
        """

        def replace_all() -> None:
            for name in names:
                stages = self._stages_of(name)
                arrays = new(name, [stage.sharding(name) for stage in stages])
                for stage, array in zip(stages, arrays, strict=True):
                    stage.replace(name, jax.block_until_ready(array))
            give_back()

        try:
            with ThreadPoolExecutor(1, thread_name_prefix="new-weights") as thread:
                thread.submit(replace_all).result()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise EngineError(f"new weights could not be installed, and some are new now: {why}") from error

    def _stages_of(self, name: str) -> list[StageWeights]:
        return [stage for stage in self._stages if name in stage]

    def _read(self, parts: Mapping[str, Source], name: str, places: Sequence[Any]) -> Iterator[Any]:
        return iter(put_in_form(parts[name], parameter_table(self._model)[name], self._dtype, places))

    def _convert(
        self, made: Mapping[str, Callable[[], Any]], name: str, places: Sequence[Any]
    ) -> Iterator[Any]:
        value = made[name]()
        return (self._fits.placed(name, value, place) for place in places)


def checked_directory(directory: Path, model: ModelConfig) -> dict[str, Source]:
    """Find how a checkpoint of the same model, or of its head, stores each weight, without reading any.

    Raises a CheckpointError; TensorMismatch if the checkpoint is of another model.
    """
    read = read_hf_config if model.reads is None else next_token_head
    found, parts = find_parameters(
        directory,
        model.attention.kv_repeats,
        state_shares=model.n_state_shares,
        forms=model.weight_forms,
        read=read,
    )
    # The end-of-sequence tokens may come from other files, and padding and states are what the devices hold.
    same = ("eos_token_ids", "vocab_multiple", "kept_states")
    found = replace(found, **{name: getattr(model, name) for name in same})
    differing = [
        field.name for field in fields(found) if getattr(found, field.name) != getattr(model, field.name)
    ]
    if differing:
        raise TensorMismatch(
            f"{directory} is another model than the one that is served: they differ in {', '.join(differing)}"
        )
    return parts


def _read_whole(tensor: StoredTensor) -> np.ndarray:
    """Read a tensor of any number of axes."""
    values = np.empty(math.prod(tensor.shape), tensor.element)
    for at, piece in replace(tensor, shape=values.shape).pieces(((0, len(values)),)):
        values[at : at + len(piece)] = piece
    return values.reshape(tensor.shape)


# A weight as stored, its shape on the devices, the attention of its layer, and the order of its rows.
_Kind = tuple[Parameter, tuple[int, ...], Attention, tuple[int, ...] | None]


class _Fitting:
    """Converts weights from a checkpoint's shapes and heads to those that the devices hold."""

    def __init__(self, stored: ModelConfig, model: ModelConfig, dtype: jnp.dtype) -> None:
        self._stored = parameter_table(stored)
        self._held = parameter_table(model)
        self._model = model
        self._dtype = dtype
        self._repeats = model.attention.kv_repeats != stored.attention.kv_repeats
        self._attention = stored.attention
        self._merged = cache(self._make_merged)

    def placed(self, name: str, value: Any, places: Any) -> Any:
        """A copy of the weight in the model's dtype and its form, in the places of the form's arrays."""
        held = self._held[name]
        dense = self._placed_dense(name, value, place_of_dense(held, places))
        return in_form(held, dense, places)

    def _placed_dense(self, name: str, value: Any, place: jax.sharding.Sharding) -> jax.Array:
        dtype = self._held[name].dense_dtype(self._dtype)
        held, stored = self._held[name].shape, self._stored[name]
        parts = without = None
        is_flat = len(held) < len(stored.shape)
        if is_flat or (self._repeats and self._has_heads(stored)):
            parts, slices = parts_of_heads(stored, attention_of(self._model, name), flat=is_flat)
            without = slices if is_flat else None
        elif (rows := share_rows(self._model, name)) is not None:
            parts = parts_of_rows(rows, stored.shape)
        return moved(value, place, dtype, shape=held, parts=parts, without=without)

    def merged(self, name: str, base: jax.Array, adapter: Adapter, scale: float) -> jax.Array:
        """`base`, as the devices hold it, plus the adapter, added in float32."""
        place = base.sharding
        every = place
        if isinstance(place, jax.sharding.NamedSharding):
            every = jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec())
        arrays, factor = jax.device_put((adapter.arrays, np.float32(scale)), every)
        return self._merged(self._kind(name), place, adapter.change)(base, arrays, factor)

    def _has_heads(self, stored: Parameter) -> bool:
        return engine_order(stored, self._attention) is not None

    def _kind(self, name: str) -> _Kind:
        """The key of the program that converts this weight; the same in all layers that are alike."""
        rows = share_rows(self._model, name)
        return self._stored[name], self._held[name].shape, attention_of(self._model, name), rows

    def _fit(
        self,
        value: jax.Array,
        stored: Parameter,
        shape: tuple[int, ...],
        attention: Attention,
        rows: tuple[int, ...] | None,
    ) -> jax.Array:
        if rows is not None:
            value = value[np.array(rows)]
        elif self._repeats and len(value.shape) == len(shape) and self._has_heads(stored):
            value = with_repeated_heads(value, stored, attention)
        elif len(value.shape) > len(shape):
            return with_flat_heads(value, stored, attention.repeated(1))
        return jnp.pad(value, [(0, held - own) for own, held in zip(value.shape, shape, strict=True)])

    def _make_merged(
        self, kind: _Kind, place: jax.sharding.Sharding, change: Change
    ) -> Callable[..., jax.Array]:
        def merged(base: jax.Array, arrays: tuple[jax.Array, ...], scale: jax.Array) -> jax.Array:
            added = self._fit(change(arrays) * scale, *kind)
            return (base.astype(jnp.float32) + added).astype(base.dtype)

        return jax.jit(merged, out_shardings=place)
