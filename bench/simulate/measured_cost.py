"""An iteration's time on a measured machine, as a formula with few coefficients, fitted by least squares.

seconds = a + b * tokens in the bucket + c * keys in the context + d * pairs of a query and a key that it sees

a is the fixed time of an iteration, including the host's part: an iteration counts from the return of the
previous one, or from its own issue if the engine was idle until then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.paper.serving_records import ServingRecords
from orca_jax.iteration.shape import bucket_for
from orca_jax.planning.cost_model import IterationShape, IterationSums


@dataclass(frozen=True, slots=True)
class Measured:
    """One iteration: the sums over its batch, its bucket, and its seconds."""

    sums: IterationSums
    bucket: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Seconds of an iteration, for `SimulatedEngine` with one stage; no coefficient is negative."""

    constant: float
    per_token: float
    per_key: float
    per_pair: float
    bucket_sizes: tuple[int, ...]

    def __call__(self, sums: IterationSums) -> list[float]:
        """The seconds of an iteration with these sums, on the only stage."""
        bucket = bucket_for(sums.n_tokens, self.bucket_sizes)
        return [self.seconds(sums, bucket)]

    def seconds(self, sums: IterationSums, bucket: int) -> float:
        """The seconds of an iteration in this bucket."""
        in_reach = self.per_key * sums.n_keys + self.per_pair * sums.n_seen
        return self.constant + self.per_token * bucket + in_reach


def measured(records: ServingRecords) -> list[Measured]:
    """The iterations in the records of a whole run on one stage."""
    arrived = {request.request_id: request.arrived for request in records.requests}
    known: dict[str, int] = {}  # tokens of each request that are in the cache
    before: float | None = None
    iterations: list[Measured] = []
    for record in records.iterations:
        kv_lengths: list[int] = []
        for name, n_input in zip(record.request_ids, record.input_lengths, strict=True):
            known[name] = known.get(name, 0) + n_input
            kv_lengths.append(known[name])
        assert record.returned is not None, "a run that ended lost no iteration"
        there = min(arrived[name] for name in record.request_ids)
        start = before if before is not None and there <= before else record.issued
        sums = IterationShape(record.input_lengths, kv_lengths).sums()
        iterations.append(Measured(sums, record.bucket, record.returned - start))
        before = record.returned
    return iterations


def fit(iterations: Sequence[Measured], bucket_sizes: Sequence[int]) -> MeasuredCost:
    """Least squares over all iterations; a coefficient that would be negative is set to 0, and the others are
    fitted without it.
    """
    features = np.array([_features(iteration) for iteration in iterations])
    seconds = np.array([iteration.seconds for iteration in iterations])
    kept = list(range(features.shape[1]))
    coefficients: npt.NDArray[np.float64] = np.zeros(features.shape[1])
    while kept:
        scale = features[:, kept].mean(axis=0)  # so that columns of different sizes round alike
        solved = np.linalg.lstsq(features[:, kept] / scale, seconds, rcond=None)[0] / scale
        if solved.min() >= 0:
            coefficients[kept] = solved
            break
        kept.pop(int(np.argmin(solved * scale)))
    constant, per_token, per_key, per_pair = coefficients.tolist()
    return MeasuredCost(constant, per_token, per_key, per_pair, tuple(bucket_sizes))


def error_of(cost: MeasuredCost, iterations: Sequence[Measured]) -> float:
    """The median error of an iteration's formula, relative to its measured time."""
    errors = [
        abs(cost.seconds(iteration.sums, iteration.bucket) / iteration.seconds - 1)
        for iteration in iterations
    ]
    return float(np.median(errors))


def _features(iteration: Measured) -> tuple[float, ...]:
    return (1.0, iteration.bucket, iteration.sums.n_keys, iteration.sums.n_seen)
