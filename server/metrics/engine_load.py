"""An engine's load as one number, for routers, autoscalers and `/metrics`."""

from orca_jax.scheduling.cache_kinds import slots_to_reserve
from orca_jax.service.orca import Orca


def engine_load(service: Orca) -> float:
    """The slots that all live requests may take to their ends, over all slots of the engine.

    Above 1 not all live requests fit to their ends. Admitted requests count with what Algorithm 1 promises
    them, `max_tokens` in whole blocks, and waiting ones with what they will ask for. So a request counts the
    same from its arrival to its end, whatever the policy reserves and however far it is. Blocks that several
    requests share count for each of them.

    For any thread; O(live requests), microseconds for a full batch and below a millisecond for a full queue.
    """
    kv = service.scheduler.kv
    n_slots = sum([slots_to_reserve(req, kv.block_size) for req in service.pool.live()])
    return n_slots / (kv.n_blocks * kv.block_size)


def batch_load(service: Orca) -> float:
    """The places that all live requests take in a batch, over the places of all batches in flight.

    Above 1 requests wait for a place, even where slots are left. A beam search takes a place for each beam.
    For any thread; O(live requests).
    """
    scheduler = service.scheduler
    n_places = scheduler.config.max_batch_size * scheduler.engine.n_workers
    return sum([req.kind.n_rows for req in service.pool.live()]) / n_places
