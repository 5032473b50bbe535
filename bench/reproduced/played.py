"""Plays requests with the real scheduler on a simulated engine, and what their clients see."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.simulate.cluster import Cluster
from bench.simulate.places import Partition, Places
from bench.simulate.workload import poisson, prompt
from orca_jax.config import ServingConfig
from orca_jax.planning.cost_model import IterationShape
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.timeline import RequestRecord, TimelineObserver
from orca_jax.simulation.simulation import Simulation

Cost = Callable[[IterationShape], float]  # the seconds of an iteration
_KEPT = 16  # records of the timeline; `_Ended` has the requests
_SAMPLING = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Job:
    """A request: its arrival in seconds, tokens in and out, and the output tokens that it may have."""

    arrival: float
    n_input: int
    n_output: int
    limit: int


def poisson_jobs(lengths: Sequence[tuple[int, int]], rate: float, seed: int = 0) -> list[Job]:
    """Requests of these lengths, in and out, as a Poisson process; the limits are the outputs' lengths."""
    arrivals = poisson(len(lengths), rate, seed).tolist()
    return [Job(at, n_in, n_out, n_out) for at, (n_in, n_out) in zip(arrivals, lengths, strict=True)]


class Stop:
    """A request's sink, which ends its output after `n` tokens, as an end-of-sequence token would."""

    def __init__(self, n: int) -> None:
        self.n_output = n
        self._n_left = n

    def push(self, token_id: int) -> bool:
        self._n_left -= 1
        return self._n_left == 0


class _Ended(TimelineObserver):
    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def ended(self, record: RequestRecord, request: Request) -> None:
        self.records.append(record)


def play(
    serving: ServingConfig, cost: Cost, jobs: Iterable[Job], observers: Sequence[TimelineObserver] = ()
) -> list[RequestRecord]:
    """Play the jobs, which arrive in ascending order, to the last end; their records in that order."""
    simulation = Simulation(serving, duration=cost, token=None, max_records=_KEPT)
    ended = _Ended()
    simulation.timeline.observers = (ended, *observers)
    simulation.add_each(
        (
            job.arrival,
            Request(
                str(i),
                prompt(job.n_input),
                job.n_input + job.limit,
                _SAMPLING,
                seed=0,
                sink=Stop(job.n_output),
            ),
        )
        for i, job in enumerate(jobs)
    )
    simulation.run()
    assert not simulation.refused, simulation.refused[0]
    return sorted(ended.records, key=lambda record: record.arrival)


def floors(partition: Partition, cluster: Cluster) -> Cost:
    """The cost model's floors, with what the collectives and the gaps between kernels take."""
    places = Places(partition, cluster)
    return lambda shape: sum(places(shape.sums()))


def first_token(records: Iterable[RequestRecord], share: float) -> float:
    """A quantile of the time to the first token, in seconds."""
    return float(np.quantile([one.token_times[0] - one.arrived for one in records], share))


def gaps(records: Iterable[RequestRecord]) -> list[float]:
    """The seconds between two tokens of a request, of all requests."""
    return [gap for one in records for gap in np.diff(np.asarray(one.token_times)).tolist()]


def per_token(record: RequestRecord) -> float:
    """The mean seconds between the tokens of a request; 0 for a single one."""
    times = record.token_times
    return (times[-1] - times[0]) / max(1, len(times) - 1)
