"""The costs of reading and of computing a prompt's blocks, by the cost model and the tiers' bandwidths."""

import math
from collections.abc import Sequence

from orca_jax.config import ServingConfig, Sizes
from orca_jax.families.model_config import ModelConfig
from orca_jax.planning.cost_model import Device, IterationShape
from orca_jax.planning.known_devices import KnownDevice
from orca_jax.planning.sizes import seconds_at_least
from orca_jax.planning.stage_memory import StageRoom
from orca_jax.scheduling.tier_costs import TierCosts

_CHUNK = 512  # tokens of a prompt, for the time of one


def tier_costs(
    model: ModelConfig,
    rooms: Sequence[StageRoom],
    asked: Sizes,
    serving: ServingConfig,
    *,
    rates: Device,
    gpu: KnownDevice | None = None,
) -> TierCosts:
    """The costs of an engine with these stages, whose devices compute at `rates`.

    The bandwidth of a tier that is not `asked` counts as infinite, but for the host's memory, to which a
    known `gpu` has its link.
    """
    n = max(1, min(_CHUNK, serving.max_batch_tokens, model.n_positions // 2))
    depth = model.n_positions - n
    split = model.for_devices(rooms[0].n_devices)
    early, late = (
        seconds_at_least(IterationShape([n], [n + before]), split, rooms, rates) for before in (0, depth)
    )
    pair = (late - early) / (n * depth) if depth else 0.0
    n_devices = sum(room.n_devices for room in rooms)
    link = math.inf if gpu is None else gpu.host_link * n_devices
    host = serving.host_block_bytes / (asked.kv_host_bandwidth or link)

    def further(bandwidth: float | None) -> float:
        return host + serving.host_block_bytes / (bandwidth or math.inf)

    return TierCosts(
        block_size=serving.block_size,
        token=max(0.0, early / n - pair * (n + 1) / 2),
        pair=pair,
        host=host,
        disk=further(asked.kv_disk_bandwidth),
        peer=further(asked.kv_transfer_bandwidth),
        state=serving.host_state_bytes / serving.host_block_bytes if serving.n_host_states else 0.0,
    )
