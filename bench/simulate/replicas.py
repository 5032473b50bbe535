"""Many requests per second on many replicas, each a separate system.

Requests are dispatched at random or in turn, regardless of a replica's load. So replicas are independent, and
each is simulated separately with its own requests; figures are over all of them.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import pairwise
from multiprocessing import get_context
from typing import Literal

import numpy as np

from bench.simulate.figures import Served, StreamedFigures, served
from bench.simulate.serving import System, play
from bench.simulate.workload import MakeWorkload, Workload

Dispatch = Literal["random", "in turn"]
_DISPATCH = 2  # a third stream of a seed


def shares(workload: Workload, n_replicas: int, dispatch: Dispatch, seed: int) -> list[Workload]:
    """Each replica's requests, in order of arrival."""
    n = len(workload)
    if dispatch == "in turn":
        return [workload.part(slice(i, None, n_replicas)) for i in range(n_replicas)]
    replica = np.random.default_rng([seed, _DISPATCH]).integers(0, n_replicas, n)
    order = np.argsort(replica, kind="stable")
    starts = np.searchsorted(replica[order], np.arange(n_replicas + 1))
    return [workload.part(order[start:stop]) for start, stop in pairwise(starts)]


def serve_replicas(
    system: System,
    make_workload: MakeWorkload,
    n_requests: int,
    *,
    rate: float,
    n_replicas: int,
    simulated: int | None = None,
    dispatch: Dispatch = "random",
    seed: int = 0,
    n_processes: int,
    on_replica: Callable[[int, int], object],
) -> Served:
    """Serve all requests, or those of the first `simulated` replicas; `rate` is over all replicas.

    A part represents the whole because replicas are equal: the throughput is scaled up, latencies are not.
    """
    workload = make_workload(n_requests, rate=rate, seed=seed)
    first = float(workload.arrivals[0])
    parts = [part for part in shares(workload, n_replicas, dispatch, seed)[:simulated] if len(part)]
    figures: list[StreamedFigures] = []
    with ProcessPoolExecutor(n_processes, mp_context=get_context("spawn")) as pool:
        tasks = [pool.submit(play, system, part) for part in parts]
        for task in as_completed(tasks):
            figures.append(task.result())
            on_replica(len(figures), len(tasks))
    scale = n_replicas / min(n_replicas, simulated or n_replicas)
    return served(figures, rate=rate, first_arrival=first, scale=scale)
