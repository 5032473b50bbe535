"""The sizes of an engine: what a user asks for, and for the rest what follows from model and memory."""

from collections.abc import Sequence

from orca_jax.config import ServingConfig, Sizes
from orca_jax.errors import ConfigError
from orca_jax.families.model_config import ModelConfig
from orca_jax.iteration.shape import EngineShape
from orca_jax.planning.stage_memory import StageRoom
from orca_jax.scheduling.kv_manager import KVManager, round_up


def serving_config(
    config: ModelConfig, asked: Sizes, rooms: Sequence[StageRoom], *, coarse_buckets: bool = False
) -> ServingConfig:
    """Fill in what was not asked for, and check the rest against the model.

    `n_slots` is the largest that fits, as ORCA 4.2 advises: a slot takes room on every stage, so the one of
    `rooms`, which are the stages', with the least decides. More than all admitted requests could ever reserve
    is of no use; where memory is not the engine's alone, a full batch of the longest requests is enough.
    `coarse_buckets` are for GPUs (iteration/buckets.py). Raises ConfigError.
    """
    longest = config.n_positions
    whole_request = round_up(longest, asked.block_size)
    sizes = asked.filled(n_slots=whole_request, max_batch_tokens=max(2048, longest, asked.max_batch_size))
    if sizes.max_batch_tokens < longest:
        raise ConfigError(
            f"max_batch_tokens is {sizes.max_batch_tokens}; it must be at least the model's {longest} "
            "positions, so that the longest prompt fits into one iteration"
        )
    rows = n_rows(asked.max_batch_size, n_workers=len(rooms))
    fits = [room.slots(room.memory(config, sizes, rows)) for room in rooms]
    modest = any(room.modest is not None for room in rooms)
    n_requests = asked.max_batch_size if modest else rows
    return asked.filled(
        n_slots=max(whole_request, min(n_requests * whole_request, *fits)),
        max_batch_tokens=sizes.max_batch_tokens,
        coarse_buckets=coarse_buckets,
    )


def n_rows(max_batch_size: int, *, n_workers: int) -> int:
    """How many requests may be admitted at a time: a batch for each worker, and one that is prepared."""
    return (n_workers + 1) * max_batch_size


def engine_shape(model: ModelConfig, serving: ServingConfig, *, n_workers: int) -> EngineShape:
    """The shape of an engine that serves this model so, with as many batches in flight as it has workers."""
    return EngineShape(
        block_size=serving.block_size,
        max_blocks=-(-model.n_positions // serving.block_size),
        max_rows=serving.max_batch_size,
        max_tokens=serving.max_batch_tokens,
        n_rows=n_rows(serving.max_batch_size, n_workers=n_workers),
        n_blocks=serving.n_blocks,
        vocab_size=model.vocab_size,
        deterministic=serving.deterministic,
        coarse_buckets=serving.coarse_buckets,
    )


def kv_manager(shape: EngineShape) -> KVManager:
    """The K/V manager of an engine of this shape."""
    return KVManager(
        n_blocks=shape.n_blocks,
        block_size=shape.block_size,
        n_rows=shape.n_rows,
        max_blocks_per_row=shape.max_blocks,
    )
