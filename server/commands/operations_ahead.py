"""Begins to build a CPU's operations while JAX is imported: both take seconds, and there are two cores."""

import os
from pathlib import Path

import orca_jax
from orca_jax.config import EngineConfig
from orca_jax.errors import OrcaError
from orca_jax.families.hf_config import read_config
from orca_jax.native.compiler import keep_libraries
from orca_jax.native.operations import build_all_ahead
from orca_jax.workers.environment import compile_cache_folder, visible_gpus

_DEMO_MODEL = Path(orca_jax.__file__).parent / "demo_model"


def begin(config: EngineConfig) -> None:
    """Begin if the engine runs in this process, without a GPU, and the model is a directory here.

    It is only a guess: the engine builds what it needs, and reports what is wrong with the model.
    """
    directory = _DEMO_MODEL if config.model is None else Path(str(config.model)).expanduser()
    if not config.in_this_process or visible_gpus(os.environ, os.listdir("/dev")):
        return
    try:
        model = read_config(directory)
    except (OrcaError, OSError, ValueError):
        return
    keep_libraries(compile_cache_folder(config.compile_cache, os.environ))
    dtype = config.dtype or "float32"
    forms = {"experts": model.kind_of_experts, "value_size": model.attention.value_part}
    build_all_ahead(model.head_size, config.block_size, dtype, **forms)
