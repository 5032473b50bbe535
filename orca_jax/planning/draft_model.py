"""A draft model's engine by arithmetic: its sizes, its memory beside the served model, and its time."""

from collections.abc import Sequence
from dataclasses import replace

from orca_jax.config import ParallelConfig, SchedulingConfig, ServingConfig, Sizes
from orca_jax.errors import ConfigError
from orca_jax.families.model_config import ModelConfig
from orca_jax.planning.cost_model import IterationShape, operations
from orca_jax.planning.known_devices import CPU
from orca_jax.planning.sizes import engine_shape, iteration_costs
from orca_jax.planning.stage_memory import DraftMemory, StageRoom

# Tokens of an iteration of a draft model: a prompt that it has to compute comes in chunks of so many.
CHUNK = 512
# What an iteration costs besides its operations, for the host starts it and waits for its token: on a GPU in
# seconds, and on a CPU, whose costs are relative, the weights that are read in that time.
_HOST_SECONDS, _HOST_BYTES = 2e-4, 8 << 20
_CONTEXT = 1024  # tokens before a drafted one


def check_draft_model(name: str, model: ModelConfig) -> None:
    """Raise ConfigError for a model that cannot draft."""
    if model.encoder is not None or model.has_state:
        part = "an encoder" if model.encoder is not None else "recurrent layers"
        raise ConfigError(f"the draft model {name} has {part}, and cannot draft yet; choose another")


def draft_split(model: ModelConfig, served: ParallelConfig) -> ParallelConfig:
    """The split of a draft model beside a model that is `served` so.

    A head is on the last stage's devices, split as the stage's layers, for it reads states that are there.
    Another draft model is on the first stage's first device.
    """
    n_devices = served.tensor_parallel if model.reads else 1
    return ParallelConfig(tensor_parallel=n_devices, expert_exchange=served.expert_exchange)


def draft_serving(serving: Sizes | ServingConfig, *, n_slots: int, prefix_caching: bool) -> ServingConfig:
    """The sizes of a draft model's engine beside one of these sizes. It has few buckets: each is compiled."""
    return ServingConfig(
        max_batch_size=serving.max_batch_size,
        n_slots=n_slots,
        max_batch_tokens=max(CHUNK, 2 * serving.max_batch_size),
        block_size=serving.block_size,
        coarse_buckets=True,
        scheduling=SchedulingConfig(prefix_caching=prefix_caching),
    )


def draft_memory(model: ModelConfig, requested: Sizes, room: StageRoom) -> DraftMemory:
    """The memory of a draft model that has the devices of `room` to itself."""
    serving = draft_serving(requested, n_slots=requested.block_size, prefix_caching=False)
    memory = room.memory(model, engine_shape(model, serving, n_workers=1))
    head = model.reads is not None
    return DraftMemory(weights=memory.weights, fixed=memory.fixed, slot=memory.slot, head=head)


def with_draft(rooms: Sequence[StageRoom], memory: DraftMemory) -> list[StageRoom]:
    """The stages' memory if a draft model shares the devices of one of them (`draft_split`)."""
    rooms, at = list(rooms), -1 if memory.head else 0
    rooms[at] = replace(rooms[at], draft=memory)
    return rooms


def draft_costs(
    serving: ServingConfig,
    model: ModelConfig,
    room: StageRoom,
    served: ModelConfig,
    served_rooms: Sequence[StageRoom],
    *,
    device: str,
) -> tuple[float, ...]:
    """The time of a draft model's iteration of each bucket of `serving`, in the unit of the served model's.

    `room` and `served_rooms` are the devices of the draft model and of the stages of the `served` one.
    """
    costs = iteration_costs(serving, model, [room], device=device)
    if device.lower() != CPU:
        return tuple(cost + _HOST_SECONDS for cost in costs)
    ratio = (_read_bytes(model, [room]) + _HOST_BYTES) / (_read_bytes(served, served_rooms) + _HOST_BYTES)
    return tuple(cost * ratio for cost in costs)


def _read_bytes(model: ModelConfig, rooms: Sequence[StageRoom]) -> float:
    """Bytes that the decode of one token reads."""
    shape = IterationShape([1], [min(_CONTEXT, model.n_positions)])
    return sum(
        each.n_bytes
        for room in rooms
        for each in operations(
            model,
            shape,
            weight_bytes=room.itemsize,
            kv_bytes=room.itemsize,
            layers=room.layers,
            n_shards=room.n_devices,
        )
    )
