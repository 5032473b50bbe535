"""An iteration's time on a measured machine, as a formula with few coefficients, fitted by least squares.

seconds = a + f(tokens in the bucket) + b * rows + c * keys in the context + d * pairs of a query and a key

f is piecewise linear and does not descend, with a slope for each stretch between KNOTS. One slope for all
buckets is wrong on any machine: small buckets wait for the weights, while large ones compute; and the head
and the sampler see a row for each request, not for each token, so that a token of a long prompt costs less
than one of a batch of decodes. a is the fixed time of an iteration, including the host's part: an iteration
counts from the return of the previous one, or from its own issue if the engine was idle until then.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from bench.paper.serving_records import ServingRecords
from orca_jax.iteration.shape import bucket_for
from orca_jax.planning.cost_model import IterationShape, IterationSums

KNOTS = (0, 4, 16, 64, 256, 1 << 30)  # between stretches of buckets
_N_OTHERS = 4  # coefficients that are no slopes
_FITS = 20
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measured:
    """One iteration: the sums over its batch, its bucket, and its seconds."""

    sums: IterationSums
    bucket: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Seconds of an iteration, for `SimulatedEngine` with one stage; no coefficient is negative.

    `per_token` has the slope of each stretch of buckets.
    """

    constant: float
    per_token: tuple[float, ...]
    per_row: float
    per_key: float
    per_pair: float
    bucket_sizes: tuple[int, ...]

    def __call__(self, sums: IterationSums) -> list[float]:
        """The seconds of an iteration with these sums, on the only stage."""
        bucket = bucket_for(sums.n_tokens, self.bucket_sizes)
        return [self.seconds(sums, bucket)]

    def seconds(self, sums: IterationSums, bucket: int) -> float:
        """The seconds of an iteration in this bucket."""
        in_bucket = sum(slope * n for slope, n in zip(self.per_token, _stretches(bucket), strict=True))
        in_reach = self.per_key * sums.n_keys + self.per_pair * sums.n_seen
        return self.constant + in_bucket + self.per_row * sums.n_rows + in_reach


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
    """Least squares over all iterations, each weighted by one over its time.

    Without weights the few iterations over long prompts decide, and the many over decodes fit badly. The
    weights are those of the fitted times, so that the sum of all iterations' times is the measured one. A
    coefficient that would be negative is set to 0, and the others are fitted without it. Stretches beyond the
    largest bucket seen go on with the last slope.
    """
    features = np.array([_features(iteration) for iteration in iterations])
    seconds = np.array([iteration.seconds for iteration in iterations])
    coefficients = _least_squares(features, seconds, np.ones_like(seconds))
    for _ in range(_FITS):
        coefficients = _least_squares(features, seconds, 1 / (features @ coefficients))
    constant, per_row, per_key, per_pair, *per_token = coefficients.tolist()
    n_seen = int(features.any(axis=0).sum()) - _N_OTHERS
    per_token[n_seen:] = [per_token[n_seen - 1]] * (len(per_token) - n_seen)
    return MeasuredCost(constant, tuple(per_token), per_row, per_key, per_pair, tuple(bucket_sizes))


def _least_squares(features: Floats, seconds: Floats, weights: Floats) -> Floats:
    """The coefficients, none below 0."""
    kept = [i for i in range(features.shape[1]) if features[:, i].any()]
    coefficients: Floats = np.zeros(features.shape[1])
    root = np.sqrt(weights)
    while kept:
        scale = features[:, kept].mean(axis=0)  # so that columns of different sizes round alike
        scaled = root[:, None] * features[:, kept] / scale
        solved = np.linalg.lstsq(scaled, root * seconds, rcond=None)[0] / scale
        if solved.min() >= 0:
            coefficients[kept] = solved
            break
        kept.pop(int(np.argmin(solved * scale)))
    return coefficients


def error_of(cost: MeasuredCost, iterations: Sequence[Measured]) -> float:
    """The median error of an iteration's formula, relative to its measured time."""
    errors = [
        abs(cost.seconds(iteration.sums, iteration.bucket) / iteration.seconds - 1)
        for iteration in iterations
    ]
    return float(np.median(errors))


def _features(iteration: Measured) -> tuple[float, ...]:
    sums = iteration.sums
    return (1.0, sums.n_rows, sums.n_keys, sums.n_seen, *_stretches(iteration.bucket))


def _stretches(bucket: int) -> list[int]:
    """The bucket's tokens in each stretch."""
    return [max(0, min(bucket, end) - start) for start, end in pairwise(KNOTS)]
