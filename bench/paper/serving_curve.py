"""Turns records of a play into figures: throughput, latency, the reasons for them, and curves over the load.

The records may come from a clock or from a simulation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from bench.paper.request_level import RowWork
from bench.paper.serving_records import ServingRecords


@dataclass(frozen=True, slots=True)
class Reasons:
    """Counts of the effects of scheduling on a trace (ORCA 2, 6.2).

    `late_joining` iterations were the first of one request and a later one of another; after `early_finished`
    ones a request left while others of the batch continued. Among `rows`, one for each request of each
    iteration, the tokens of `fed_rows` were discarded because an input token followed, and `done_rows` were
    computed for requests that had all their tokens. `waited_for_batch` is the sum over requests of the
    seconds from a request's last token to its end, `waited_to_begin` of those from its arrival to its first
    iteration.
    """

    iterations: int
    late_joining: int
    early_finished: int
    rows: int
    fed_rows: int
    done_rows: int
    waited_for_batch: float
    waited_to_begin: float


@dataclass(frozen=True, slots=True)
class Served:
    """The figures of one play; times in seconds.

    `seconds` is the time from the first arrival to the last end; `req_s` is finished requests and `tokens_s`
    generated tokens per second of it. Normalized latency is end-to-end latency over generated tokens (ORCA
    6.2).
    """

    n_requests: int
    seconds: float
    req_s: float
    tokens_s: float
    normalized_median: float
    normalized_p90: float
    normalized_p99: float
    latency_median: float
    reasons: Reasons


class Point(Protocol):
    """The two figures that systems are compared by: requests a second, and seconds per generated token."""

    @property
    def req_s(self) -> float:
        """Finished requests a second."""
        ...

    @property
    def normalized_median(self) -> float:
        """Median normalized latency."""
        ...


Curve = Sequence[Served]  # of one system, by ascending load


def served(records: ServingRecords) -> Served:
    """The figures of a play in which every request got its tokens."""
    requests = records.requests
    latencies: list[float] = []
    normalized: list[float] = []
    for one in requests:
        assert one.finished is not None and one.normalized_latency is not None, f"{one.request_id} has no end"
        latencies.append(one.finished - one.arrived)
        normalized.append(one.normalized_latency)
    seconds = max(one.finished or 0.0 for one in requests) - min(one.arrived for one in requests)
    median, p90, p99 = np.quantile(normalized, [0.5, 0.9, 0.99]).tolist()
    return Served(
        n_requests=len(requests),
        seconds=seconds,
        req_s=len(requests) / seconds,
        tokens_s=sum(one.n_output for one in requests) / seconds,
        normalized_median=median,
        normalized_p90=p90,
        normalized_p99=p99,
        latency_median=float(np.median(latencies)),
        reasons=reasons(records),
    )


def reasons(records: ServingRecords) -> Reasons:
    """Count the reasons for a play's figures."""
    last: dict[str, int] = {}  # by request: the index of its last iteration,
    last_token: dict[str, int] = {}  # and of the one that computed its last token
    n_fed = n_done = 0
    for i, iteration in enumerate(records.iterations):
        for j, name in enumerate(iteration.request_ids):
            last[name] = i
            work = records.rows[i].rows[j] if records.rows else RowWork.GENERATING
            if work is RowWork.GENERATING:
                last_token[name] = i
            n_fed += work is RowWork.FED
            n_done += work is RowWork.DONE
    late = early = n_rows = 0
    begun = set[str]()
    for i, iteration in enumerate(records.iterations):
        n_rows += iteration.n_rows
        begins = [name not in begun for name in iteration.request_ids]
        begun.update(iteration.request_ids)
        late += any(begins) and not all(begins)
        leaves = [last[name] == i for name in iteration.request_ids]
        early += any(leaves) and not all(leaves)
    waited = 0.0
    for one in records.requests:
        computed = records.iterations[last_token[one.request_id]].returned
        assert computed is not None and one.finished is not None
        waited += max(0.0, one.finished - computed)
    return Reasons(
        iterations=len(records.iterations),
        late_joining=late,
        early_finished=early,
        rows=n_rows,
        fed_rows=n_fed,
        done_rows=n_done,
        waited_for_batch=waited,
        waited_to_begin=sum(one.queue_time or 0.0 for one in records.requests),
    )


def throughput_at(curve: Sequence[Point], latency: float) -> float | None:
    """Requests a second at a median normalized latency, in seconds: on the line between two points.

    Lines connect points of neighbouring loads. If several pass that latency, the highest throughput counts;
    None if none does.
    """
    found: list[float] = []
    for low, high in pairwise(curve):
        ends = (low.normalized_median, high.normalized_median)
        if min(ends) <= latency <= max(ends):
            share = (latency - ends[0]) / (ends[1] - ends[0]) if ends[0] != ends[1] else 1.0
            found.append(low.req_s + share * (high.req_s - low.req_s))
    return max(found, default=None)


def best_of(curves: Mapping[str, Sequence[Point]], latency: float) -> tuple[str, float] | None:
    """The system with the most requests a second at that latency, and their number, or None."""
    found = {name: at for name, curve in curves.items() if (at := throughput_at(curve, latency)) is not None}
    return max(found.items(), key=lambda item: item[1], default=None)
