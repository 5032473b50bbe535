"""A system under increasing load: the curve of throughput and latency (ORCA 6.2, Figure 10)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.simulate.figures import Served
from bench.simulate.serving import System, serve
from bench.simulate.workload import MakeWorkload, paper_workload

STEP = 1.6  # factor between rates
HALVINGS = 4  # of the step that crosses the latency
COARSE = 2  # points outside of that step have half of the requests
FAR = 4.0  # multiple of that latency at which to stop, once the load exceeds the capacity
SATURATED, FLOODED = 0.9, 0.5  # share of the load that is served: overloaded, and far overloaded


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The loads for a system, from `lowest` requests per second up; `seed` determines the requests.

    A point has `n_requests`, or as many as arrive in `seconds`, whichever is more; a coarse one fewer.
    """

    lowest: float
    n_requests: int
    seconds: float
    workload: MakeWorkload = paper_workload
    seed: int = 0


# A batch of the baseline takes up to a minute, and ORCA's requests ten seconds.
ORCA_LOAD = Load(lowest=1.0, n_requests=1500, seconds=150.0)
BASELINE_LOAD = Load(lowest=0.03, n_requests=600, seconds=0.0)


def load_of(system: System) -> Load:
    """The load for a system of this kind."""
    return ORCA_LOAD if system.mbs is None else BASELINE_LOAD


def curve(system: System, latency: float, load: Load) -> list[Served]:
    """Points by ascending load, up to saturation; denser where the median normalized latency is `latency`.

    Raises DoesNotFit.
    """
    points: dict[float, Served] = {}

    def at(rate: float, coarse: int = 1) -> Served:
        n = max(load.n_requests, math.ceil(load.seconds * rate)) // coarse
        points[rate] = serve(system, load.workload(n, rate=rate, seed=load.seed), rate=rate)
        return points[rate]

    rate = load.lowest
    while not _beyond(at(rate, COARSE), latency):
        rate *= STEP
    rates = sorted(points)
    low = max((r for r in rates if points[r].normalized_median <= latency), default=None)
    high = min((r for r in rates if low is not None and r > low), default=None)
    for _ in range(HALVINGS):
        if low is None or high is None:
            break
        middle = math.sqrt(low * high)
        low, high = (middle, high) if at(middle).normalized_median <= latency else (low, middle)
    return [points[rate] for rate in sorted(points)]


def peak(points: Sequence[Served]) -> float:
    """The most requests per second at any latency."""
    return max(point.req_s for point in points)


def _beyond(point: Served, latency: float) -> bool:
    share = point.req_s / point.rate
    return share < FLOODED or (share < SATURATED and point.normalized_median > FAR * latency)
