"""A whole serving on a virtual clock: arrivals and cancellations at their times, from a trace to its end."""

import math
from collections.abc import Callable, Iterator, Sequence

from orca_jax.config import ServingConfig
from orca_jax.cost_model import IterationShape
from orca_jax.errors import OrcaError
from orca_jax.kv_manager import KVManager
from orca_jax.request import FinishReason, Request
from orca_jax.request_pool import Delivery, RequestPool
from orca_jax.scheduler import Scheduler
from orca_jax.simulated_engine import SimulatedEngine, VirtualClock, hashed_token
from orca_jax.timeline import Timeline


class Simulation:
    """Pool, scheduler, K/V manager and simulated engine, as a service has them, on one virtual clock.

    Set what shall happen with `add_at` and `end_at`, then `run`. `deliveries` collects what users would see,
    `refused` the requests that the pool did not take, each with the error; `timeline` holds every record.
    """

    def __init__(
        self,
        config: ServingConfig,
        *,
        n_workers: int = 1,
        duration: Callable[[IterationShape], float] = lambda _: 1.0,
        token: Callable[[Request, int], int] = hashed_token,
        check: Callable[[Request], None] = lambda _: None,
        bucket_sizes: Sequence[int] = (),
    ) -> None:
        self.deliveries: list[Delivery] = []
        self.refused: list[tuple[Request, OrcaError]] = []
        self.clock = VirtualClock()
        self.timeline = Timeline(self.clock.now, max_records=None, bucket_sizes=bucket_sizes)
        self.pool = RequestPool(
            max_waiting=config.max_queue,
            check=check,
            on_arrival=self.timeline.arrived,
            on_deliveries=self.deliveries.extend,
        )
        self.engine = SimulatedEngine(self.clock, n_workers=n_workers, duration=duration, token=token)
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

        def add() -> None:
            try:
                self.pool.add(request)
            except OrcaError as error:
                self.refused.append((request, error))

        self.clock.call_at(time, add)

    def end_at(self, time: float, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Let the user of `request_id` ask for its end at `time`, whether it is live or not."""
        self.clock.call_at(time, lambda: self.pool.end(request_id, reason))

    def steps(self) -> Iterator[None]:
        """Play to the end; yields after each turn of the scheduler's loop that had something to do."""
        while True:
            while self.clock.next_event() <= self.clock.now():
                self.clock.run_next()
            if self.scheduler.step():
                yield
            elif self.clock.next_event() < math.inf:
                self.clock.run_next()
            else:
                return

    def run(self) -> Timeline:
        """Play to the end; returns the timeline."""
        for _ in self.steps():
            pass
        return self.timeline
