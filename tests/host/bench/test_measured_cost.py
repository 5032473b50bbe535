"""The cost of an iteration, fitted to measured ones."""

import numpy as np
import pytest

from bench.paper.serving_records import ServingRecords
from bench.simulate.measured_cost import Measured, MeasuredCost, error_of, fit, measured
from orca_jax.iteration.shape import bucket_for, bucket_sizes
from orca_jax.planning.cost_model import IterationShape, IterationSums
from orca_jax.scheduling.timeline import IterationRecord, RequestRecord

SIZES = bucket_sizes(256)
TRUE = MeasuredCost(0.02, 1e-3, 5e-6, 2e-8, SIZES)


def iterations(cost: MeasuredCost, n: int, noise: float = 0.0) -> list[Measured]:
    rng = np.random.default_rng(4)
    result: list[Measured] = []
    for _ in range(n):
        n_rows = int(rng.integers(1, 9))
        inputs = [int(rng.integers(2, 20)) if rng.random() < 0.3 else 1 for _ in range(n_rows)]
        sums = IterationShape(inputs, [q + int(rng.integers(0, 100)) for q in inputs]).sums()
        bucket = bucket_for(sums.n_tokens, SIZES)
        result.append(
            Measured(sums, bucket, cost.seconds(sums, bucket) * (1 + noise * rng.standard_normal()))
        )
    return result


def test_what_is_linear_is_found_again():
    result = fit(iterations(TRUE, 200), SIZES)
    assert (result.constant, result.per_token, result.per_key, result.per_pair) == pytest.approx(
        (0.02, 1e-3, 5e-6, 2e-8), rel=1e-6
    )
    assert error_of(result, iterations(TRUE, 50)) < 1e-9


def test_noise_leaves_the_sum_of_all_iterations():
    noisy = iterations(TRUE, 400, noise=0.2)
    result = fit(noisy, SIZES)
    assert sum(result.seconds(iteration.sums, iteration.bucket) for iteration in noisy) == pytest.approx(
        sum(iteration.seconds for iteration in noisy)
    )


def test_no_coefficient_is_below_0():
    noisy = iterations(MeasuredCost(0.02, 1e-3, 0.0, 0.0, SIZES), 60, noise=0.3)
    for cost in (fit(noisy, SIZES), fit(noisy[:5], SIZES)):
        assert min(cost.constant, cost.per_token, cost.per_key, cost.per_pair) >= 0.0


def test_a_cost_pads_to_the_bucket():
    (seconds,) = TRUE(IterationSums(n_rows=2, n_tokens=17, n_keys=40, n_seen=50))
    assert seconds == pytest.approx(0.02 + 24 * 1e-3 + 40 * 5e-6 + 50 * 2e-8)


def test_seconds_go_from_the_return_before_or_from_the_issue_after_a_pause():
    """B comes while A runs, and is issued ahead of A's return; C comes 2 seconds after everything ended."""
    records = ServingRecords(
        [RequestRecord("A", 4, 0.0), RequestRecord("B", 2, 0.5), RequestRecord("C", 3, 9.0)],
        [
            IterationRecord(0, 0.1, ("A",), (True,), (4,), 8, returned=2.0),
            IterationRecord(1, 1.0, ("A", "B"), (False, True), (1, 2), 8, returned=5.0),
            IterationRecord(2, 5.3, ("A", "B"), (False, False), (1, 1), 8, returned=7.0),
            IterationRecord(3, 9.2, ("C",), (True,), (3,), 8, returned=10.0),
        ],
    )
    result = measured(records)
    assert [iteration.seconds for iteration in result] == pytest.approx([1.9, 3.0, 2.0, 0.8])
    assert [iteration.sums for iteration in result] == [
        IterationSums(1, 4, 4, 10),
        IterationSums(2, 3, 5 + 2, 5 + 3),
        IterationSums(2, 2, 6 + 3, 6 + 3),
        IterationSums(1, 3, 3, 6),
    ]
