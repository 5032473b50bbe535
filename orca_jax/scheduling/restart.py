"""Requests after a failure of the engine, a lost worker, or new weights, which the paper does not describe.

All functions are for the scheduler's thread, between two turns of its loop.
"""

from orca_jax.errors import LossCause
from orca_jax.request.request import FinishReason
from orca_jax.scheduling.quarantine import Suspicion
from orca_jax.scheduling.request_pool import Delivery
from orca_jax.scheduling.scheduler import Scheduler


def fail_all(scheduler: Scheduler) -> None:
    """After an EngineError: drop all batches in flight, and end all live requests with reason `error`."""
    _drop_in_flight(scheduler)
    scheduler.kv.forget()
    live = list(scheduler.pool.in_arrival_order())
    scheduler.deliver([scheduler.end(req, FinishReason.ERROR) for req in live])


def run_again(
    scheduler: Scheduler, why: str = "a worker was lost", cause: LossCause = LossCause.FAULT
) -> Suspicion:
    """After WorkerLost: drop the K/V cache and all batches in flight, and let the requests resume.

    Each admitted request returns to INITIATION and keeps its row, blocks and reservation; with a prefix cache
    or blocks on demand it waits again. Its next iteration recomputes the prompt and the output so far, and
    samples the same next token as without the loss. Tokens that were computed but not returned are computed
    again. Requests that were asked to end are ended. So is a request that the quarantine blames for losses of
    this `cause`; its error quotes `why`. Returns what the quarantine found.
    """
    present = {req for iteration in scheduler.in_flight for req, _ in iteration.rows}
    suspicion = scheduler.quarantine.record_loss(present, cause)
    _drop_in_flight(scheduler)
    ended: list[Delivery] = []
    for req in reversed(scheduler.pool.admitted()):
        if req.ending is not None:
            ended.append(scheduler.end(req, req.ending))
        elif req is suspicion.culprit:
            req.failure = f"a worker was lost {req.n_losses} times while this request ran, the last time "
            req.failure += f"while it ran alone, so it is not retried ({why})"
            ended.append(scheduler.end(req, FinishReason.ERROR))
    compute_all_again(scheduler)
    scheduler.deliver(ended[::-1])
    return suspicion


def compute_all_again(scheduler: Scheduler) -> None:
    """After the K/V cache was lost while no batch is in flight: let admitted requests compute it again."""
    assert not scheduler.in_flight and not scheduler.leaving
    kv = scheduler.kv
    kv.forget()
    # Blocks may be shared, or too few for all known tokens.
    wait = kv.prefixes is not None or scheduler.config.scheduling.on_demand
    for req in reversed(scheduler.pool.admitted()):  # the oldest is the last to go to the queue's front
        if wait or req.kind.forks:
            scheduler.preempt(req)
        else:
            req.compute_again()


def change_weights(scheduler: Scheduler, version: int) -> None:
    """Let the engine's new weights have this version. No batch is in flight.

    Begun requests keep their tokens and compute all keys and values again, so their next tokens depend on the
    new weights alone. Cached blocks of the old weights are never found again.
    """
    scheduler.weights_version = version
    scheduler.kv.namespace = f"weights {version}"
    if scheduler.kv.disk is not None:
        scheduler.kv.disk.stop()
    if scheduler.kv.arriving is not None:
        scheduler.kv.arriving.stop()
    if scheduler.kv.leases is not None:
        scheduler.kv.leases.stop()
    compute_all_again(scheduler)
    for req in scheduler.begun():
        req.block_hashes = None  # they have the old namespace
        req.use_weights(version)


def _drop_in_flight(scheduler: Scheduler) -> None:
    """Forget all batches in flight: they will not return, and no longer write to the cache."""
    scheduler.in_flight.clear()
    for req in scheduler.leaving:
        req.n_in_flight = req.n_partial = 0
        scheduler.release(req)
    scheduler.leaving.clear()
    for req in scheduler.pool.admitted():
        req.n_iterations -= req.n_in_flight  # lost iterations do not count
        req.n_in_flight = req.n_partial = 0
