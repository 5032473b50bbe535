"""Statistics of a long run, accumulated as it runs, without keeping its requests."""

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from orca_jax.request.request import Request
from orca_jax.scheduling.timeline import IterationRecord, RequestRecord, TimelineObserver

EDGE = 10  # throughput leaves out the first and the last tenth of the ends


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The results of a workload. Latencies are normalized (ORCA 6.2: end to end over generated tokens).

    `req_s` is requests finished per second, counted between the first and the last tenth of all ends, so that
    neither an empty start nor a slow end matters; `seconds` is from the first arrival to the last end;
    `mean_batch` is the requests per iteration. Times are in seconds.
    """

    rate: float
    n_requests: int
    req_s: float
    normalized_median: float
    normalized_p90: float
    normalized_p99: float
    tokens_s: float
    mean_batch: float
    n_iterations: int
    seconds: float

    def slower(self, times: float) -> "Served":
        """The same with every duration, including the gaps between arrivals, multiplied by `times`."""
        return replace(
            self,
            rate=self.rate / times,
            req_s=self.req_s / times,
            normalized_median=self.normalized_median * times,
            normalized_p90=self.normalized_p90 * times,
            normalized_p99=self.normalized_p99 * times,
            tokens_s=self.tokens_s / times,
            seconds=self.seconds * times,
        )

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class StreamedFigures(TimelineObserver):
    """Keeps two numbers per request, and sums over iterations."""

    def __init__(self) -> None:
        self.normalized = array("d")  # seconds
        self.ends = array("d")
        self.n_tokens = 0
        self.n_iterations = 0
        self.n_rows = 0

    def returned(self, record: IterationRecord) -> None:
        """Count an iteration, and its rows."""
        self.n_iterations += 1
        self.n_rows += record.n_rows

    def ended(self, record: RequestRecord, request: Request) -> None:
        """Record a request's normalized latency, and when it ended."""
        assert record.normalized_latency is not None and record.finished is not None
        self.normalized.append(record.normalized_latency)
        self.ends.append(record.finished)
        self.n_tokens += record.n_output

    def served(self, *, rate: float, first_arrival: float) -> Served:
        """The results for everything that has ended."""
        return served([self], rate=rate, first_arrival=first_arrival)


def served(
    parts: Sequence[StreamedFigures], *, rate: float, first_arrival: float, scale: float = 1.0
) -> Served:
    """The results of several replicas that ran in parallel, which are one in `scale` of all replicas."""
    normalized = np.concatenate([np.asarray(part.normalized) for part in parts])
    ends = np.sort(np.concatenate([np.asarray(part.ends) for part in parts]))
    left_out = len(ends) // EDGE
    first, last = float(ends[left_out]), float(ends[-1 - left_out])
    seconds = float(ends[-1]) - first_arrival
    # All ended in one batch: there is no second end to measure from.
    req_s = (len(ends) - 1 - 2 * left_out) / (last - first) if last > first else len(ends) / seconds
    median, p90, p99 = np.quantile(normalized, (0.5, 0.9, 0.99)).tolist()
    n_iterations = sum(part.n_iterations for part in parts)
    return Served(
        rate=rate,
        n_requests=len(ends),
        req_s=scale * req_s,
        normalized_median=median,
        normalized_p90=p90,
        normalized_p99=p99,
        tokens_s=scale * sum(part.n_tokens for part in parts) / seconds,
        mean_batch=sum(part.n_rows for part in parts) / n_iterations,
        n_iterations=n_iterations,
        seconds=seconds,
    )
