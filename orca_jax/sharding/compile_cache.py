"""Compiled programs are kept on disk, so that a process that starts again need not compile them again."""

import os
from pathlib import Path

import jax

FOLDER = Path("~/.cache/orca_jax/compiled")
_VARIABLE = "JAX_COMPILATION_CACHE_DIR"  # JAX's own


def keep_compiled_programs() -> None:
    """Use JAX's persistent cache, in FOLDER unless JAX was told another place; for small programs too."""
    if not os.environ.get(_VARIABLE):
        jax.config.update("jax_compilation_cache_dir", str(FOLDER.expanduser()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
