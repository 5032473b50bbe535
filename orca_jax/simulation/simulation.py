"""A whole serving on a virtual clock: arrivals and cancellations at their times, from a trace to its end."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

from orca_jax.config import ServingConfig
from orca_jax.errors import OrcaError
from orca_jax.planning.cost_model import IterationShape, IterationSums
from orca_jax.request.request import FinishReason, Request
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.request_pool import Delivery, RequestPool
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import Timeline
from orca_jax.simulation.engine import SimulatedEngine, VirtualClock, hashed_token


class Steps(Protocol):
    """What a simulation drives: a Scheduler, or one that is compared with it."""

    def step(self) -> bool:
        """One turn; False when no request is live."""
        ...


def steps(clock: VirtualClock, scheduler: Steps) -> Iterator[None]:
    """Play to the end; yields after each turn of the scheduler's loop that had something to do."""
    while True:
        while clock.next_event() <= clock.now():
            clock.run_next()
        if scheduler.step():
            yield
        elif clock.next_event() < math.inf:
            clock.run_next()
        else:
            return


def arrive(
    clock: VirtualClock, arrivals: Iterable[tuple[float, Request]], add: Callable[[Request], None]
) -> None:
    """Let requests arrive at their times, which ascend.

    One is asked for when the one before it has arrived, so that a million of them need no more room than one.
    """
    upcoming = iter(arrivals)

    def set_next() -> None:
        following = next(upcoming, None)
        if following is not None:
            clock.call_at(following[0], partial(arrived, following[1]))

    def arrived(request: Request) -> None:
        add(request)
        set_next()

    set_next()


class Simulation:
    """Pool, scheduler, K/V manager and simulated engine, as a service has them, on one virtual clock.

    Set what shall happen with `add_at`, `add_each` and `end_at`, then `run`. `deliveries` collects what users
    would see, `refused` the requests that the pool did not take, each with the error; `timeline` holds every
    record. With `max_records` the timeline has so many alone, and no delivery is kept: whoever wants figures
    of a long run observes the timeline.
    """

    def __init__(
        self,
        config: ServingConfig,
        *,
        n_workers: int = 1,
        duration: Callable[[IterationShape], float] = lambda _: 1.0,
        places: Callable[[IterationSums], Sequence[float]] | None = None,
        token: Callable[[Request, int], int] | None = hashed_token,
        check: Callable[[Request], None] = lambda _: None,
        bucket_sizes: Sequence[int] = (),
        max_records: int | None = None,
    ) -> None:
        self.deliveries: list[Delivery] = []
        self.refused: list[tuple[Request, OrcaError]] = []
        self.clock = VirtualClock()
        self.timeline = Timeline(self.clock.now, max_records=max_records, bucket_sizes=bucket_sizes)
        self.pool = RequestPool(
            max_waiting=config.max_queue,
            check=check,
            on_arrival=self.timeline.arrived,
            on_deliveries=self.deliveries.extend if max_records is None else _not_kept,
        )
        self.engine = SimulatedEngine(
            self.clock, n_workers=n_workers, duration=duration, places=places, token=token
        )
        self.kv = KVManager(
            n_blocks=config.n_blocks,
            block_size=config.block_size,
            # A request is admitted only into a batch with all earlier ones that may run, and what holds a row
            # and may not is in a batch in flight: there is a row for each place of all these batches.
            n_rows=(n_workers + config.overlap) * config.max_batch_size,
            max_blocks_per_row=config.n_blocks,
        )
        self.scheduler = Scheduler(self.pool, self.engine, self.kv, config=config, timeline=self.timeline)

    def add_at(self, time: float, request: Request) -> None:
        """Let `request` arrive at `time`."""
        self.clock.call_at(time, lambda: self._add(request))

    def add_each(self, arrivals: Iterable[tuple[float, Request]]) -> None:
        """Let these arrive, each at its time; the times ascend."""
        arrive(self.clock, arrivals, self._add)

    def end_at(self, time: float, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Let the user of `request_id` ask for its end at `time`, whether it is live or not."""
        self.clock.call_at(time, lambda: self.pool.end_named(request_id, reason))

    def steps(self) -> Iterator[None]:
        """Play to the end; yields after each turn of the scheduler's loop that had something to do."""
        return steps(self.clock, self.scheduler)

    def run(self) -> Timeline:
        """Play to the end; returns the timeline."""
        for _ in self.steps():
            pass
        return self.timeline

    def _add(self, request: Request) -> None:
        try:
            self.pool.add(request)
        except OrcaError as error:
            self.refused.append((request, error))


def _not_kept(_: Sequence[Delivery]) -> None:
    pass
