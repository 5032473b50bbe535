"""Caches compiled programs on disk, so that a restarted process need not compile them again."""

import os
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from orca_jax.config import COMPILE_CACHE
from orca_jax.errors import ConfigError
from orca_jax.native.compiler import keep_libraries
from orca_jax.workers.environment import compile_cache_folder

_AUTOTUNING = "xla_gpu_per_fusion_autotune_cache_dir"  # XLA's measurements of a GPU's kernels


def keep_compiled_programs(
    folder: str | Path | None = COMPILE_CACHE, *, stage: tuple[int, int] | None = None
) -> Path | None:
    """Enable JAX's persistent cache for all programs of this process, including small ones and autotuning.

    Programs are stored in the `compile_cache_folder`; None disables the cache. `stage` is (index from 0,
    number of stages) if each stage has a process. Each process then has a subfolder, because JAX writes files
    in place, and processes that start together would read each other's incomplete files. Returns the folder,
    or None. Raises ConfigError.
    """
    path = compile_cache_folder(folder, os.environ)
    before = _in_use()
    jax.config.update("jax_enable_compilation_cache", path is not None)
    keep_libraries(path)
    if path is not None:
        if stage is not None and stage[1] > 1:
            path /= f"stage-{stage[0] + 1}-of-{stage[1]}"
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError("it cannot be written to")
        except OSError as error:
            raise ConfigError(
                f"compile_cache is {str(path)!r}, which cannot be used: {error.strerror or error}; name a "
                "folder that can be written to, or none"
            ) from error
        jax.config.update("jax_compilation_cache_dir", str(path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        jax.config.update("jax_persistent_cache_enable_xla_caches", _AUTOTUNING)
    if before != _in_use():
        # JAX decides at its first compile whether and where to cache; this makes it decide again.
        compilation_cache.reset_cache()
    return path


def _in_use() -> tuple[bool, str | None]:
    config: Any = jax.config  # jax's stub does not declare settings as attributes
    return config.jax_enable_compilation_cache, config.jax_compilation_cache_dir
