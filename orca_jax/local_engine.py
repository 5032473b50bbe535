# pyright: standard
"""Composition: an engine whose workers are all in this process."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from orca_jax.batch_sizes import batch_sizes, buckets_of
from orca_jax.built_engine import BuiltEngine
from orca_jax.config import Attention, Dtype, LoadFormat, ModelConfig, ServingConfig
from orca_jax.engine_master import EngineMaster
from orca_jax.kv_manager import KVManager
from orca_jax.model.gpt import Parameters
from orca_jax.sharding.capacity import check_slots, slots_that_fit
from orca_jax.sharding.device_group import default_dtype, device_name
from orca_jax.sharding.load import FoundModel, load_parameters
from orca_jax.sharding.local_workers import LocalWorkers
from orca_jax.sharding.partition import StagePart, split_model
from orca_jax.sharding.worker import Worker
from orca_jax.sizes import Sizes, control_wire, kv_manager, serving_config
from orca_jax.stage_layers import said_of_split


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
) -> BuiltEngine:
    """Load a model onto the first devices that JAX has; the arguments are those of `orca_jax.llm.LLM`.

    Raises ConfigError or a CheckpointError.
    """
    devices = jax.devices()
    name = dtype or default_dtype(devices[0])
    itemsize = jnp.dtype(name).itemsize
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
    fits = [slots_that_fit(model, itemsize, part, n_devices=n_devices) for part in parts]
    serving = serving_config(model, said, fits)
    for part in parts:
        check_slots(model, itemsize, part, n_slots=serving.n_slots, n_devices=n_devices)
    buckets = buckets_of(
        serving.max_batch_tokens, serving.max_batch_size, deterministic=serving.deterministic
    )
    built = build_engine(model, parameters, serving, parts, buckets=buckets, attention=attention)
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


class LocalEngine(NamedTuple):
    """An engine, the K/V manager of its cache, and a line that says which attention it runs."""

    engine: EngineMaster
    kv: KVManager
    attention: str


def build_engine(
    model: ModelConfig,
    parameters: Sequence[Parameters],
    serving: ServingConfig,
    parts: Sequence[StagePart],
    *,
    buckets: Sequence[int] | None = None,
    attention: Attention | None = None,
    worker: Worker | None = None,
) -> LocalEngine:
    """An engine of a worker for each of `parts`, with that stage's `parameters`. Raises ConfigError.

    `buckets` are those of `serving` unless given, ascending; `attention` is the
    Workers'. The first `worker` of the same model, parts and sizes that no engine uses any more may be handed
    in: it and those behind it keep their compiled programs, and their own attention.
    """
    n_workers = len(parts)
    kv = kv_manager(model, serving, n_workers=n_workers)
    if worker is None:
        for part, own in zip(reversed(parts), reversed(parameters), strict=True):  # each knows the one behind
            worker = Worker(
                model, own, serving, part, n_rows=kv.n_rows, attention=attention, next_worker=worker
            )
    assert worker is not None, "a model has a stage"
    sizes = None if buckets is None else tuple(buckets)
    workers = LocalWorkers(worker, batch_sizes(control_wire(model, serving, kv), sizes))
    engine = EngineMaster(workers, kv, vocab_size=model.vocab_size, n_workers=n_workers)
    return LocalEngine(engine, kv, worker.attention.said)


def _nothing_to_close() -> None:
    """Device memory goes with the arrays."""
