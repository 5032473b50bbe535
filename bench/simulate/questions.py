"""Questions beyond the paper: the effect of `max_bs`, of pipeline depth, and of the tails of lengths."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any

from bench.paper.serving_curve import throughput_at
from bench.simulate.cluster import Cluster
from bench.simulate.figure_10 import Figure
from bench.simulate.load import ORCA_LOAD, Load, curve, load_of, peak
from bench.simulate.places import Partition
from bench.simulate.serving import DoesNotFit, System
from bench.simulate.workload import Tails
from orca_jax.errors import ConfigError

SWEPT_MAX_BS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
STAGES_MAX_BS = (8, 32, 128)  # many stages need small batches, so small values are included
SIGMAS = (0.0, 0.5, 1.0, 1.5)
TAIL_SYSTEMS: tuple[tuple[int, int | None], ...] = ((128, None), (1, 1), (8, 8))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row of an answer: its label, the system, and the load."""

    name: str
    system: System
    load: Load


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A case's throughput at the requested latency, and its maximum; requests per second.

    `req_s` is None if even the lowest load is slower than that. `p99` is the normalized latency, in seconds,
    of the point with the most requests per second within the latency. `problem` says why it cannot run.
    """

    name: str
    system: str
    req_s: float | None = None
    peak_req_s: float | None = None
    p99: float | None = None
    mean_batch: float | None = None
    problem: str | None = None

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def max_bs_cases(figure: Figure, cluster: Cluster, *, overlap: bool) -> list[Case]:
    """ORCA by `max_bs`."""
    return [
        _case(str(n), System(partition=figure.partition, cluster=cluster, max_bs=n, overlap=overlap))
        for n in SWEPT_MAX_BS
    ]


def stages_cases(figure: Figure, cluster: Cluster, *, overlap: bool) -> list[Case]:
    """ORCA on the figure's number of devices, split into stages in every way that the model allows."""
    n = figure.n_stages * figure.n_devices
    cases: list[Case] = []
    for n_stages in (i for i in range(1, n + 1) if n % i == 0):
        try:
            partition = Partition(model=figure.partition.model, n_stages=n_stages, n_devices=n // n_stages)
        except ConfigError:  # heads or layers do not divide
            continue
        for max_bs in STAGES_MAX_BS:
            system = System(partition=partition, cluster=cluster, max_bs=max_bs, overlap=overlap)
            cases.append(_case(f"{n_stages} x {n // n_stages}", system))
    return cases


def tails_cases(figure: Figure, cluster: Cluster, *, overlap: bool) -> list[Case]:
    """ORCA and the baseline under log-normal lengths with equal means."""
    cases: list[Case] = []
    for sigma in SIGMAS:
        for max_bs, mbs in TAIL_SYSTEMS:
            system = System(
                partition=figure.partition, cluster=cluster, max_bs=max_bs, mbs=mbs, overlap=overlap
            )
            name = f"sigma {sigma:g}" if sigma else "uniform"
            cases.append(Case(name=name, system=system, load=replace(load_of(system), workload=Tails(sigma))))
    return cases


CASES: dict[str, Callable[..., list[Case]]] = {
    "max-bs": max_bs_cases,
    "stages": stages_cases,
    "tails": tails_cases,
}


def answer(case: Case, latency: float) -> Answer:
    """A case's curve, read at a median normalized latency in seconds."""
    label = case.system.label
    try:
        points = curve(case.system, latency, case.load)
    except DoesNotFit as error:
        return Answer(name=case.name, system=label, problem=str(error))
    within = [point for point in points if point.normalized_median <= latency]
    best = max(within, key=lambda point: point.req_s, default=None)
    return Answer(
        name=case.name,
        system=label,
        req_s=throughput_at(points, latency),
        peak_req_s=peak(points),
        p99=None if best is None else best.normalized_p99,
        mean_batch=None if best is None else best.mean_batch,
    )


def answers(
    cases: Sequence[Case], latency: float, *, n_processes: int, on_case: Callable[[int, int], object]
) -> list[Answer]:
    """The answers in the order of the cases; `on_case` gets the number of finished cases and the total."""
    with ProcessPoolExecutor(n_processes, mp_context=get_context("spawn")) as pool:
        tasks = [pool.submit(answer, case, latency) for case in cases]
        for n_done, _ in enumerate(as_completed(tasks), 1):
            on_case(n_done, len(tasks))
        return [task.result() for task in tasks]


def _case(name: str, system: System) -> Case:
    return Case(name=name, system=system, load=ORCA_LOAD)
