"""Simulates serving on a virtual clock: plays the arrivals and cancellations of a trace to its end."""

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
from orca_jax.scheduling.waiting_queue import waiting_queue
from orca_jax.simulation.engine import SimulatedEngine, VirtualClock, hashed_token


class Steps(Protocol):
    """What a simulation drives: a Scheduler, or a scheduler to compare with it."""

    def step(self) -> bool:
        """Take one turn; return False when no request is live."""
        ...


def steps(clock: VirtualClock, scheduler: Steps) -> Iterator[None]:
    """Play to the end; yields after each turn of the scheduler's loop that did some work."""
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
    """Schedule the arrivals of requests, in ascending order of time.

    Each request is taken from `arrivals` when the previous one has arrived, so a million need no more memory
    than one.
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
    """A service's pool, scheduler and K/V manager with a simulated engine, on one virtual clock.

    Schedule events with `add_at`, `add_each` and `end_at`, then `run`. `deliveries` collects what users would
    see, `refused` the requests that the pool rejected, each with the error, and `timeline` every record. With
    `max_records` the timeline keeps only that many and deliveries are dropped: observe the timeline for the
    figures of a long run.
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
            queue=waiting_queue(config.scheduling),
            clock=self.clock.now,
            on_deliveries=self.deliveries.extend if max_records is None else _not_kept,
        )
        self.engine = SimulatedEngine(
            self.clock, n_workers=n_workers, duration=duration, places=places, token=token
        )
        self.kv = KVManager(
            n_blocks=config.n_blocks,
            block_size=config.block_size,
            # A request is admitted only together with all earlier ones that may run, and every other request
            # that holds a row is in a batch in flight, so one row for each place of these batches suffices.
            n_rows=(n_workers + config.overlap) * config.max_batch_size,
            max_blocks_per_row=config.n_blocks,
            prefix_caching=config.scheduling.prefix_caching,
        )
        self.scheduler = Scheduler(self.pool, self.engine, self.kv, config=config, timeline=self.timeline)

    def add_at(self, time: float, request: Request) -> None:
        """Schedule the arrival of `request` at `time`."""
        self.clock.call_at(time, lambda: self._add(request))

    def add_each(self, arrivals: Iterable[tuple[float, Request]]) -> None:
        """Schedule arrivals, in ascending order of time."""
        arrive(self.clock, arrivals, self._add)

    def end_at(self, time: float, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Schedule the end of a request by its user at `time`, whether or not it is live then."""
        self.clock.call_at(time, lambda: self.pool.end_named(request_id, reason))

    def steps(self) -> Iterator[None]:
        """Play to the end; yields after each turn of the scheduler's loop that did some work."""
        return steps(self.clock, self.scheduler)

    def run(self) -> Timeline:
        """Play to the end and return the timeline."""
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
