# pyright: standard
"""The weights and caches of worker processes, which change with the orders of a new epoch."""

import fcntl
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from orca_jax.checkpoint import orbax
from orca_jax.checkpoint.safetensors_writer import Tensor, write_files
from orca_jax.config import Layout
from orca_jax.engine.remote_workers import RemoteEngine
from orca_jax.errors import CheckpointError, ConfigError, WorkerLost
from orca_jax.families.config_json import config_to_json
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import parameter_table
from orca_jax.families.trainers.orca_json import ORCA_JSON
from orca_jax.launch.local_memory import ADAPTERS_JSON, checked_directory
from orca_jax.launch.module_update import ModuleWeights
from orca_jax.launch.new_weights import check_adapters, check_arrays, check_replaceable, named_arrays
from orca_jax.user_model.decoder import ModuleShapes

_PREFIX = "orca-sent-weights-"  # of the names of temporary directories


class _Files:
    """A temporary directory, removed when nothing refers to it any more, or at exit.

    A process that is killed leaves its own behind, with whole weights in it, perhaps in memory. So whoever
    makes one removes those whose process has ended: while a process runs it holds a lock of its directory.
    """

    def __init__(self) -> None:
        _remove_ownerless()
        while True:
            self.directory = Path(tempfile.mkdtemp(prefix=_PREFIX))  # mode 0700
            lock = os.open(self.directory, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks, where nobody else gets it either
                fcntl.flock(lock, fcntl.LOCK_EX)
            if self.directory.exists():  # or another process found it before it was locked
                break
            os.close(lock)
        self.remove = weakref.finalize(self, _remove, self.directory, lock)


def _remove_ownerless() -> None:
    """Remove the directories of processes that were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, another process's, or gone
            lock = os.open(directory, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)


def _remove(directory: Path, lock: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)


class RemoteMemory:
    """An EngineMemory for worker processes, each of which reads its stage's part of a checkpoint.

    A worker that is restarted reads the same checkpoint again, so the directory must exist until the next
    update. With `same_machine` new weights may also be arrays, which go to the workers in a temporary
    checkpoint, or adapters, which each worker merges into its weights. `module` has the shapes of a model
    that a user wrote.
    """

    def __init__(
        self,
        engine: RemoteEngine,
        *,
        model: ModelConfig,
        dtype: str,
        same_machine: bool,
        module: ModuleShapes | None = None,
    ) -> None:
        self._module = None if module is None else ModuleWeights(module)
        self._engine = engine
        self._model = model
        self._dense = model.with_forms({})  # as trainers have it
        self._dtype = jnp.dtype(dtype)
        self._same_machine = same_machine
        self._n_updates = 0
        self._files: _Files | None = None  # of the current weights
        self._adapter_files: _Files | None = None  # and of the adapters that are added to them

    def prepare(
        self, weights: object, *, cast: bool, lora_scale: float, layout: Layout | None = None
    ) -> Callable[[], None]:
        check_replaceable(self._model)
        if isinstance(weights, str | Path):
            directory = Path(weights).absolute()
            if self._same_machine or directory.exists():
                if self._module is None:
                    checked_directory(directory, self._model)
                else:
                    self._module.found(directory)
            return partial(self._load, directory, None)
        if self._module is not None:
            of_module = self._module.checked(weights, cast=cast, layout=layout)
            files = self._files_here()
            self._module.write(files.directory / "weights", of_module)
            return partial(self._load, files.directory / "weights", files)
        arrays = named_arrays(weights)
        adapters = check_adapters(arrays, self._dense, layout)
        made = {}
        if adapters is None:
            made = check_arrays(arrays, self._dense, self._dtype, cast=cast, layout=layout)
        files = self._files_here()
        if adapters is not None:
            write_adapters(files.directory, arrays, lora_scale)
            return partial(self._adapt, files)
        write_arrays(files.directory / "weights", self._dense, self._dtype, made)
        return partial(self._load, files.directory / "weights", files)

    def _files_here(self) -> _Files:
        """A directory for new weights. Raises ConfigError if not all workers can read it."""
        if not self._same_machine:
            raise ConfigError(
                "workers on other machines take no arrays and no adapters; save a checkpoint of the whole "
                "weights where each of them can read it, and give its directory"
            )
        return _Files()

    def read_ahead(self, directory: Path) -> Callable[[], None]:
        return self.prepare(directory, cast=False, lora_scale=1.0)

    def release(self, level: int) -> None:
        self._change("go to sleep", sleep_level=level)

    def restore(self) -> None:
        self._change("wake up", sleep_level=0)

    def _load(self, directory: Path, files: _Files | None) -> None:
        self._n_updates += 1
        self._change(
            f"load {directory}",
            weights_version=self._n_updates,
            weights_directory=str(directory),
            adapters_version=0,
            adapters_directory="",
        )
        self._files, self._adapter_files = files, None

    def _adapt(self, files: _Files) -> None:
        self._n_updates += 1
        self._change(
            "add the adapters", adapters_version=self._n_updates, adapters_directory=str(files.directory)
        )
        self._adapter_files = files

    def _change(self, what: str, **fields: Any) -> None:
        """Begin an epoch with changed orders; if that fails, the next epoch has the old orders again."""
        workers = self._engine.workers
        before = workers.orders
        workers.change_orders([replace(order, **fields) for order in before])
        try:
            up = self._engine.recover(lambda: False)
        except WorkerLost as lost:
            workers.change_orders(before)
            raise CheckpointError(f"a worker could not {what}, and all continue as before: {lost}") from lost
        assert up, "nothing interrupts it"


def write_adapters(directory: Path, arrays: Mapping[str, Any], scale: float) -> None:
    """Write adapters for LocalMemory.adapt, as float32. Raises ConfigError."""

    def tensor(name: str, array: Any) -> Tensor:
        float32 = np.dtype(np.float32)
        return Tensor(name, array.shape, float32, lambda: np.asarray(array).astype(float32))

    tensors = [tensor(*pair) for pair in arrays.items()]
    try:
        write_files(directory, tensors, max_bytes=sum(one.n_bytes for one in tensors))
        (directory / ADAPTERS_JSON).write_text(json.dumps({"scale": float(scale)}), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the adapters cannot be written to {directory}: {error.strerror}") from error


def write_arrays(
    directory: Path, model: ModelConfig, dtype: np.dtype, made: Mapping[str, Callable[[], Any]]
) -> None:
    """Write an Orbax checkpoint of these weights, one at a time. Raises ConfigError or CheckpointError."""
    table = parameter_table(model)
    try:
        orbax.write(
            directory, made, lambda name: np.asarray(made[name]()).astype(table[name].dense_dtype(dtype))
        )
        text = json.dumps({"model": config_to_json(model)})
        (directory / ORCA_JSON).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the new weights cannot be written to {directory}: {error.strerror}") from error
