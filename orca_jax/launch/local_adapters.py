# pyright: standard
"""The LoRA adapters of an engine in this process: read from PEFT's directories, put on its devices.

Adapters that were read stay in host memory, up to a number of bytes; the least recently used are read from
disk again.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from orca_jax.checkpoint.peft import LoadedAdapter, Low, read_adapter, read_adapter_config
from orca_jax.config import EngineConfig
from orca_jax.errors import BadAdapter, ConfigError, UnknownAdapter, did_you_mean, shown
from orca_jax.execution.worker import Worker
from orca_jax.families.adapters import adaptable, padded_rank, part_sizes
from orca_jax.families.family import Family
from orca_jax.families.hf_config import read_hf_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.registry import FAMILIES
from orca_jax.launch.new_weights import LORA_A, LORA_B, check_adapters, named_arrays
from orca_jax.model_files.found_model import FoundModel
from orca_jax.request.adapter import Adapter
from orca_jax.scheduling.adapter_slots import PutAdapter


def with_room_for_adapters(found: FoundModel, config: EngineConfig) -> EngineConfig:
    """`config` with a rank that all its adapters have room for, unless it names one.

    Raises ConfigError for a model that cannot have adapters, or a CheckpointError for an adapter.
    """
    if not (config.adapters or config.max_loras):
        return config
    model, why = found.config, None
    if found.user_model is not None:
        why = "a model of your own"
    elif model.encoder is not None:
        why = "a model with an encoder"
    elif config.tensor_parallel > 1 and model.has_experts:
        why = "a mixture of experts with tensor_parallel"
    elif found.directory is None:
        why = "a preset with random weights"
    if why is not None:
        raise ConfigError(f"{why} takes no LoRA adapters yet; leave lora and max_loras out")
    ranks = [
        read_adapter_config(Path(path).expanduser()).largest_rank for path in (config.adapters or {}).values()
    ]
    rank = config.filled(n_slots=config.block_size, max_batch_tokens=1 << 20).max_lora_rank
    return config if config.max_lora_rank is not None else replace(config, max_lora_rank=max([rank, *ranks]))


def family_of(found: FoundModel) -> Family:
    """The family by whose names of modules adapters are read. Raises a CheckpointError."""
    assert found.directory is not None
    return FAMILIES[read_hf_config(found.directory).family.model_type]


class LocalAdapters:
    """An AdapterStore for workers in this process, with up to `host_bytes` of adapters in memory.

    `stored` is the model as dense checkpoints have it, `model` as the devices hold it.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        family: Family,
        model: ModelConfig,
        dtype: jnp.dtype,
        *,
        stored: ModelConfig,
        max_rank: int,
        host_bytes: int,
    ) -> None:
        self._workers, self._stored = workers, stored.with_forms({})
        self._family, self._model, self._dtype = family, model, dtype
        self._max_rank, self._host_bytes = max_rank, host_bytes
        self._lock = threading.Lock()  # for the rest
        self._adapters: dict[str, Adapter] = {}
        self._n_added = 0
        self._kept: OrderedDict[Adapter, LoadedAdapter] = OrderedDict()  # least recently used first

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return MappingProxyType(self._adapters)

    def add(self, name: str, directory: str, *, replace: bool = False) -> Adapter:
        if name in self._adapters and not replace:
            raise ConfigError(f"there is an adapter {shown(name)} already; unload it first")
        directory = str(Path(directory).expanduser().absolute())
        return self._add(name, directory, self._read(directory))

    def update(self, name: str, weights: object, *, scale: float) -> Adapter:
        return self._add(name, "", self._of_arrays(named_arrays(weights), scale))

    def _add(self, name: str, directory: str, loaded: LoadedAdapter) -> Adapter:
        with self._lock:
            adapter = Adapter(name, self._n_added, directory)
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
        stacked = self.loaded(adapter).stacked(self._model, padded_rank(self._max_rank), self._dtype)
        puts = [partial(worker.put_adapter, worker.placed_adapter(stacked)) for worker in self._workers]

        def put(slot: int) -> None:
            for one in puts:
                one(slot)

        return put

    def loaded(self, adapter: Adapter) -> LoadedAdapter:
        """An adapter in host memory, read from disk if it is not there. Raises a CheckpointError."""
        with self._lock:
            loaded = self._kept.get(adapter)
        if loaded is None:
            loaded = self._read(adapter.directory)
        with self._lock:
            self._keep(adapter, loaded)
        return loaded

    def _read(self, directory: str) -> LoadedAdapter:
        return read_adapter(Path(directory), self._family, self._model, self._dtype, most_rank=self._max_rank)

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
        """An adapter of a trainer's arrays NAME.lora_a [r, *in] and NAME.lora_b [*out, r].

        Raises ConfigError, or TensorMismatch.
        """
        pairs = check_adapters(arrays, self._stored)
        if pairs is None or not any(name.endswith((LORA_A, LORA_B)) for name in arrays):
            raise ConfigError(
                f"an adapter's arrays are called NAME{LORA_A} and NAME{LORA_B} by the engine's names of "
                "weights (docs/training.md); merge other layouts, or save the adapter with PEFT"
            )
        table, changes, ranks = adaptable(self._model), dict[str, list[Low | None]](), [0]
        for name, pair in pairs.items():
            b, a = (np.asarray(array).astype(np.float32) for array in pair.arrays)
            if name not in table or table[name].shape != (*b.shape[:-1], *a.shape[1:]):
                raise ConfigError(
                    f"an adapter of {name} cannot be given in arrays here: the weight is no linear layer of "
                    "a decoder, or the devices hold it in another shape; save the adapter with PEFT"
                )
            if a.shape[0] > self._max_rank:
                raise BadAdapter(
                    f"{name}{LORA_A}: the rank is {a.shape[0]}, and the engine has room for "
                    f"{self._max_rank}; raise max_lora_rank"
                )
            b = b * np.float32(scale)
            if not (np.isfinite(a).all() and np.isfinite(b).all()):
                raise BadAdapter(f"{name}: its adapter holds NaN or infinite numbers")
            ends = np.cumsum(part_sizes(table[name]))[:-1]
            a, b = a.astype(self._dtype), b.astype(self._dtype)
            changes[name] = [Low(a, part) for part in np.split(b, ends)]
            ranks.append(len(a))
        return LoadedAdapter(changes, max(ranks))
