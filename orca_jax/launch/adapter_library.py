# pyright: standard
"""The LoRA adapters of an engine: read from PEFT's directories, and given to its workers when they are used.

Adapters that were read stay in host memory, up to a number of bytes; the least recently used are read from
disk again.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from orca_jax.checkpoint.peft import LoadedAdapter, Low, extras_in, read_adapter, read_adapter_config
from orca_jax.config import EngineConfig
from orca_jax.errors import BadAdapter, ConfigError, UnknownAdapter, did_you_mean, shown
from orca_jax.families.adapters import adaptable, part_sizes
from orca_jax.families.family import Family
from orca_jax.families.hf_config import read_hf_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.registry import FAMILIES
from orca_jax.launch.new_weights import LORA_A, LORA_B, check_adapters, named_arrays
from orca_jax.launch.trainers_arrays import AdaptersChange
from orca_jax.model_files.found_model import FoundModel
from orca_jax.request.adapter import Adapter
from orca_jax.scheduling.adapter_slots import PutAdapter

C = TypeVar("C", bound=EngineConfig)


def with_room_for_adapters(found: FoundModel, config: C) -> C:
    """`config` with room for all that its adapters change, unless it says for what there is room.

    Raises ConfigError for a model that cannot have adapters, or a CheckpointError for an adapter.
    """
    if not (config.adapters or config.max_loras):
        return config
    model, why = found.config, None
    if found.user_model is not None:
        why = "a model of your own"
    elif config.tensor_parallel > 1 and model.has_experts:
        why = "a mixture of experts with tensor_parallel"
    elif found.directory is None:
        why = "a preset with random weights"
    if why is not None:
        raise ConfigError(f"{why} takes no LoRA adapters yet; leave lora and max_loras out")
    directories = [Path(path).expanduser() for path in (config.adapters or {}).values()]
    if config.max_lora_rank is None:
        ranks = [read_adapter_config(directory).largest_rank for directory in directories]
        rank = config.filled(n_slots=config.block_size, max_batch_tokens=1 << 20).max_lora_rank
        config = replace(config, max_lora_rank=max([rank, *ranks]))
    if config.lora_extras is None:
        family = family_of(found)
        extras = {extra for directory in directories for extra in extras_in(directory, family, model)}
        config = replace(config, lora_extras=sorted(extras))
    return config


def family_of(found: FoundModel) -> Family:
    """The family by whose names of modules adapters are read. Raises a CheckpointError."""
    assert found.directory is not None
    return FAMILIES[read_hf_config(found.directory).family.model_type]


# Gives an adapter to the workers, for any slot. On the thread that reads adapters.
Place = Callable[[Adapter, LoadedAdapter], PutAdapter]


class AdapterLibrary:
    """An AdapterStore with up to `host_bytes` of adapters in memory.

    `stored` is the model as dense checkpoints have it, `model` as the devices hold it. `generation` counts
    how often the workers have lost all adapters.
    """

    def __init__(
        self,
        place: Place,
        family: Family,
        model: ModelConfig,
        dtype: jnp.dtype,
        *,
        stored: ModelConfig,
        max_rank: int,
        extras: Collection[str],
        host_bytes: int,
        generation: Callable[[], int] = lambda: 0,
    ) -> None:
        self._place, self._stored, self._generation = place, stored.with_forms({}), generation
        self._family, self._model, self._dtype = family, model, dtype
        self._max_rank, self._extras, self._host_bytes = max_rank, extras, host_bytes
        self._lock = threading.Lock()  # for the rest
        self._adapters: dict[str, Adapter] = {}
        self._n_added = 0
        self._kept: OrderedDict[Adapter, LoadedAdapter] = OrderedDict()  # least recently used first

    @property
    def generation(self) -> int:
        return self._generation()

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return MappingProxyType(self._adapters)

    def add_all(self, directories: Mapping[str, str | Path]) -> None:
        """Add the adapters that an engine begins with. Raises as `add` does."""
        for name, directory in directories.items():
            self.add(name, str(directory))

    def add(self, name: str, directory: str, *, replace: bool = False) -> Adapter:
        if name in self._adapters and not replace:
            raise ConfigError(f"there is an adapter {shown(name)} already; unload it first")
        directory = str(Path(directory).expanduser().absolute())
        return self._add(name, directory, self._read(directory))

    def update(self, name: str, weights: object, *, scale: float) -> Adapter:
        return self._add(name, "", self._of_arrays(named_arrays(weights), scale))

    def _add(self, name: str, directory: str, loaded: LoadedAdapter) -> Adapter:
        content = loaded.digest()
        with self._lock:
            adapter = Adapter(name, self._n_added, content, directory)
            self._n_added += 1
            before = self._adapters.get(name)
            # Readers have no lock: they see the adapters of before or those of afterwards.
            self._adapters = {**self._adapters, name: adapter}
            if before is not None and before.directory:  # requests that have it may need it again
                self._kept.pop(before, None)
            self._keep(adapter, loaded)
        return adapter

    def remove(self, name: str) -> Adapter:
        with self._lock:
            adapter = self._adapters.get(name)
            if adapter is None:
                message = f"there is no adapter {shown(name)} here{did_you_mean(name, self._adapters)}"
                raise UnknownAdapter(message, param="lora_name")
            self._adapters = {each: one for each, one in self._adapters.items() if each != name}
        return adapter

    def read(self, adapter: Adapter) -> PutAdapter:
        return self._place(adapter, self.loaded(adapter))

    def loaded(self, adapter: Adapter) -> LoadedAdapter:
        """An adapter in host memory, read from disk if it is not there.

        Raises a CheckpointError, and BadAdapter if its files have changed: keys and values of before are in
        the prefix cache.
        """
        with self._lock:
            loaded = self._kept.get(adapter)
        if loaded is None:
            loaded = self._read(adapter.directory)
            if loaded.digest() != adapter.content:
                raise BadAdapter(
                    f"{adapter.directory} holds other weights than when {shown(adapter.name)} was loaded; "
                    "load it again, under the same name with load_inplace"
                )
        with self._lock:
            self._keep(adapter, loaded)
        return loaded

    def _read(self, directory: str) -> LoadedAdapter:
        return read_adapter(
            Path(directory),
            self._family,
            self._model,
            self._dtype,
            most_rank=self._max_rank,
            extras=self._extras,
        )

    def _keep(self, adapter: Adapter, loaded: LoadedAdapter) -> None:
        """Keep an adapter in memory, and drop what is too much. What has no files is dropped last."""
        self._kept[adapter] = loaded
        self._kept.move_to_end(adapter)
        n_bytes = sum(one.n_bytes for one in self._kept.values())
        for other in list(self._kept):
            if n_bytes <= self._host_bytes or other is adapter:
                break
            if other.directory or self._adapters.get(other.name) is not other:
                n_bytes -= self._kept.pop(other).n_bytes

    def _of_arrays(self, arrays: Mapping[str, Any], scale: float) -> LoadedAdapter:
        """An adapter of a trainer's arrays: NAME.lora_a [r, *in] and NAME.lora_b [*out, r], or Tunix's.

        Raises ConfigError, or TensorMismatch.
        """
        pairs = check_adapters(arrays, self._stored)
        if pairs is None:
            raise ConfigError(
                f"an adapter's arrays are called NAME{LORA_A} and NAME{LORA_B} by the engine's names of "
                "weights, or as Qwix calls them in Tunix's models (docs/training.md); merge other layouts, "
                "or save the adapter with PEFT"
            )
        table, changes, ranks = adaptable(self._model), dict[str, list[Low | None]](), [0]
        for name, pair in pairs.items():
            if isinstance(pair.change, AdaptersChange):
                shape = pair.change.recipe.parameter.shape
                each = pair.change.factors(pair.arrays)
            else:
                b, a = (np.asarray(array).astype(np.float32) for array in pair.arrays)
                shape, each = (*b.shape[:-1], *a.shape[1:]), [(a, b, np.ones(b.shape[:-1], bool))]
            if name not in table or table[name].shape != shape:
                raise ConfigError(
                    f"an adapter of {name} cannot be given in arrays here: the weight is no linear layer of "
                    "a decoder, or the devices hold it in another shape; save the adapter with PEFT"
                )
            sizes = part_sizes(table[name])
            parts = changes[name] = [None] * len(sizes)
            for a, b, rows in each:
                self._check_numbers(name, a, b)
                ranks.append(len(a))
                a, b = a.astype(self._dtype), (b * np.float32(scale)).astype(self._dtype)
                first = 0
                for i, size in enumerate(sizes):
                    part = slice(first, first := first + size)
                    if rows[part].any():
                        if parts[i] is not None:
                            raise ConfigError(
                                f"two adapters of {name} change the same rows; save the adapter with PEFT"
                            )
                        parts[i] = Low(a, b[part])
        return LoadedAdapter(changes, max(ranks))

    def _check_numbers(self, name: str, a: np.ndarray, b: np.ndarray) -> None:
        """Raises BadAdapter."""
        if len(a) > self._max_rank:
            raise BadAdapter(
                f"{name}{LORA_A}: the rank is {len(a)}, and the engine has room for {self._max_rank}; raise "
                "max_lora_rank"
            )
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise BadAdapter(f"{name}: its adapter holds NaN or infinite numbers")
