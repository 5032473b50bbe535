# pyright: standard
"""Composition: a model that was found, loaded into an engine whose workers are all in this process."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from orca_jax.checkpoint.load import FoundModel, load_parameters
from orca_jax.config import Attention, Dtype, LoadFormat
from orca_jax.engine.built_engine import BuiltEngine
from orca_jax.execution.host_allocator import keep_large_buffers
from orca_jax.execution.programs import OnProgram
from orca_jax.iteration.buckets import serving_buckets
from orca_jax.launch.local_engine import build_engine, chosen_sizes
from orca_jax.planning.sizes import Sizes
from orca_jax.planning.stage_layers import said_of_split
from orca_jax.sharding.device_group import default_dtype, device_name
from orca_jax.sharding.partition import split_model


def local_engine(
    found: FoundModel,
    said: Sizes,
    *,
    load_format: LoadFormat,
    dtype: Dtype | None,
    seed: int,
    pipeline_parallel: int,
    tensor_parallel: int,
    attention: Attention | None,
    on_load: Callable[[int, int], None] | None,
    compile_ahead: bool,
    on_program: OnProgram | None,
) -> BuiltEngine:
    """Load a model onto the first devices that JAX has; the arguments are those of `orca_jax.llm.LLM`.

    Raises ConfigError or a CheckpointError.
    """
    devices = jax.devices()
    if devices[0].platform == "cpu":
        keep_large_buffers()
    name = dtype or default_dtype(devices[0])
    parts = split_model(
        found.config, devices, pipeline_parallel=pipeline_parallel, tensor_parallel=tensor_parallel
    )
    n_devices = pipeline_parallel * tensor_parallel
    model, parameters = load_parameters(
        found,
        parts,
        load_format=load_format,
        dtype=jnp.dtype(name),
        seed=seed,
        n_devices=n_devices,
        on_load=on_load,
    )
    serving = chosen_sizes(model, jnp.dtype(name), parts, said, n_devices=n_devices, attention=attention)
    buckets = serving_buckets(serving)
    built = build_engine(
        model,
        parameters,
        serving,
        parts,
        buckets=buckets,
        attention=attention,
        compile_ahead=compile_ahead,
        on_program=on_program,
    )
    return BuiltEngine(
        engine=built.engine,
        kv=built.kv,
        model=model,
        serving=serving,
        buckets=buckets,
        dtype=name,
        device=device_name(devices[0]),
        stages=said_of_split(model.n_layers, pipeline_parallel, tensor_parallel),
        attention=built.attention,
        close=_nothing_to_close,
    )


def _nothing_to_close() -> None:
    """Device memory goes with the arrays."""
