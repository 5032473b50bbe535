"""Simulates serving on a virtual clock: plays the arrivals and cancellations of a trace, or a recording."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

from orca_jax.config import ServingConfig
from orca_jax.errors import BadRecording, OrcaError
from orca_jax.planning.cost_model import IterationShape, IterationSums
from orca_jax.planning.sizes import n_rows
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.request_pool import Delivery, RequestPool
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import Timeline
from orca_jax.scheduling.waiting_queue import waiting_queue
from orca_jax.service.recording import Recording
from orca_jax.service.replay import Replay, ReplayReport, recorded_serving
from orca_jax.simulation.checked_policy import PATIENCE, watch
from orca_jax.simulation.engine import SimulatedEngine, VirtualClock, hashed_token


class Steps(Protocol):
    """A Scheduler, or another scheduler to compare with it."""

    def step(self) -> bool:
        """Take one turn; False if there was nothing to do."""
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

    A request is taken from `arrivals` when the previous one has arrived, so a million requests need no more
    memory than one.
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


# A request, its new token if any, and its finish reason if it ended.
Shown = tuple[Request, int | None, FinishReason | None]


def shown(deliveries: Sequence[Delivery]) -> Iterator[Shown]:
    """Yield deliveries that have just come token by token, as users see them."""
    for request, n_new, reason in deliveries:
        token_ids = request.output_ids[-n_new:] if n_new else []
        for token_id in token_ids[:-1]:
            yield request, token_id, None
        yield request, token_ids[-1] if token_ids else None, reason


class Simulation:
    """A service's pool, scheduler and K/V manager with a simulated engine, on one virtual clock.

    Schedule events with `add_at`, `add_each` and `end_at`, then `run`. `deliveries` collects the tokens and
    ends that users would see, `refused` the rejected requests with their errors, and `timeline` every record.
    With `max_records` the timeline keeps only that many records and deliveries are dropped: observe the
    timeline for the figures of a long run. A user's policy that breaks an invariant raises BadPolicy; one of
    them is that no request waits for `patience` turns while later ones run.
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
        patience: int = PATIENCE,
    ) -> None:
        self.deliveries: list[Shown] = []
        self.refused: list[tuple[Request, OrcaError]] = []
        self.clock = VirtualClock()
        self.timeline = Timeline(self.clock.now, max_records=max_records, bucket_sizes=bucket_sizes)
        self.pool = RequestPool(
            max_waiting=config.max_queue,
            check=check,
            on_arrival=self.timeline.arrived,
            queue=waiting_queue(config.scheduling),
            clock=self.clock.now,
            on_deliveries=lambda some: self.deliveries.extend(shown(some)) if max_records is None else None,
        )
        self.engine = SimulatedEngine(
            self.clock, n_workers=n_workers, duration=duration, places=places, token=token
        )
        self.kv = _kv_manager(
            config,
            # One row for each place of the batches in flight suffices: a request is admitted only together
            # with all earlier ones that may run, and all other requests with a row are in flight.
            n_rows=(n_workers + config.overlap) * config.max_batch_size,
            max_blocks_per_row=config.n_blocks,
        )
        self.scheduler = Scheduler(self.pool, self.engine, self.kv, config=config, timeline=self.timeline)
        watch(self.scheduler, patience)

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


def simulated_replay(recording: Recording) -> ReplayReport:
    """Repeat a recording's schedule on a simulated engine that returns the recorded tokens.

    It needs no model, weights or device. Raises BadRecording.
    """
    try:
        serving = recorded_serving(recording)
        n_workers = recording.header["n_workers"]
        n_positions = recording.header["n_positions"]
    except (KeyError, TypeError, ValueError) as error:
        raise BadRecording(f"the recording's first line lacks the engine's sizes: {error!r}") from error
    if serving.scheduling.speculates and any(_needs_model(each.sampling) for each in recording.requests):
        raise BadRecording(
            "the recording has drafts that follow a request's grammar, words or predicted output, which "
            "needs the model; replay it without simulation"
        )
    kv = _kv_manager(
        serving,
        n_rows=n_rows(serving.max_batch_size, n_workers=n_workers),
        max_blocks_per_row=-(-n_positions // serving.block_size),
    )

    def token(request: Request, index: int) -> int:
        """The recorded token, because the prefix cache finds outputs by their tokens."""
        end = recording.ends.get(request.arrival)
        return end.output_ids[index] if end is not None and index < len(end.output_ids) else 0

    engine = SimulatedEngine(VirtualClock(), n_workers=n_workers, token=token)
    return Replay(recording, engine, kv, config=serving, compares_outputs=False).run()


def _kv_manager(config: ServingConfig, *, n_rows: int, max_blocks_per_row: int) -> KVManager:
    """A K/V manager with the blocks and caches of these sizes."""
    return KVManager(
        n_blocks=config.n_blocks,
        block_size=config.block_size,
        n_rows=n_rows,
        max_blocks_per_row=max_blocks_per_row,
        prefix_caching=config.scheduling.prefix_caching,
        n_snapshots=config.n_snapshots,
        n_draft_states=config.n_draft_states,
        snapshot_blocks=config.scheduling.snapshot_blocks,
        n_host_blocks=config.n_host_blocks,
        n_host_states=config.n_host_states,
    )


def _needs_model(sampling: SamplingParams) -> bool:
    """Whether the drafts of a request with these parameters depend on its constraint or on a tokenizer."""
    has_words = bool(sampling.bad_words or sampling.min_tokens) or sampling.allowed_token_ids is not None
    return has_words or sampling.grammar is not None or sampling.prediction is not None
