"""An iteration's seconds by what a machine was measured to take: few coefficients, by least squares.

seconds = a + b * tokens in the bucket + c * keys in reach + d * pairs of a query and a key that it sees

a is what an iteration takes whatever is in it, the host's part of it too: an iteration counts from the return
of the one before it, or from its own issue where the engine had nothing to do until then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.paper.serving_records import ServingRecords
from orca_jax.iteration.buckets import bucket_for
from orca_jax.planning.cost_model import IterationShape, IterationSums


@dataclass(frozen=True, slots=True)
class Measured:
    """One iteration: the sums over its batch, its bucket, and its seconds."""

    sums: IterationSums
    bucket: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Seconds of an iteration, for `SimulatedEngine` with one stage; no coefficient is below 0."""

    constant: float
    per_token: float
    per_key: float
    per_pair: float
    bucket_sizes: tuple[int, ...]

    def __call__(self, sums: IterationSums) -> list[float]:
        """Of an iteration with these sums."""
        bucket = bucket_for(sums.n_tokens, self.bucket_sizes)
        return [self.seconds(sums, bucket)]

    def seconds(self, sums: IterationSums, bucket: int) -> float:
        """Of one in this bucket."""
        in_reach = self.per_key * sums.n_keys + self.per_pair * sums.n_seen
        return self.constant + self.per_token * bucket + in_reach


def measured(records: ServingRecords) -> list[Measured]:
    """What the records of a whole playing on one stage say."""
    arrived = {one.request_id: one.arrived for one in records.requests}
    known: dict[str, int] = {}  # tokens of each request that are in the cache
    before: float | None = None
    found: list[Measured] = []
    for record in records.iterations:
        kv_lengths: list[int] = []
        for name, first, n_input in zip(
            record.request_ids, record.initiation, record.input_lengths, strict=True
        ):
            known[name] = n_input if first else known[name] + 1
            kv_lengths.append(known[name])
        assert record.returned is not None, "a playing that came to its end lost no iteration"
        there = min(arrived[name] for name in record.request_ids)
        start = before if before is not None and there <= before else record.issued
        sums = IterationShape(record.input_lengths, kv_lengths).sums()
        found.append(Measured(sums, record.bucket, record.returned - start))
        before = record.returned
    return found


def fit(iterations: Sequence[Measured], bucket_sizes: Sequence[int]) -> MeasuredCost:
    """Least squares over all iterations; a coefficient that would be below 0 is 0, and the others are found
    without it.
    """
    features = np.array([_features(one) for one in iterations])
    seconds = np.array([one.seconds for one in iterations])
    kept = list(range(features.shape[1]))
    found: npt.NDArray[np.float64] = np.zeros(features.shape[1])
    while kept:
        scale = features[:, kept].mean(axis=0)  # so that columns of different sizes count alike in rounding
        solved = np.linalg.lstsq(features[:, kept] / scale, seconds, rcond=None)[0] / scale
        if solved.min() >= 0:
            found[kept] = solved
            break
        kept.pop(int(np.argmin(solved * scale)))
    constant, per_token, per_key, per_pair = found.tolist()
    return MeasuredCost(constant, per_token, per_key, per_pair, tuple(bucket_sizes))


def error_of(cost: MeasuredCost, iterations: Sequence[Measured]) -> float:
    """The median of how far an iteration is from its cost, over what it took."""
    errors = [abs(cost.seconds(one.sums, one.bucket) / one.seconds - 1) for one in iterations]
    return float(np.median(errors))


def _features(one: Measured) -> tuple[float, ...]:
    return (1.0, one.bucket, one.sums.n_keys, one.sums.n_seen)
