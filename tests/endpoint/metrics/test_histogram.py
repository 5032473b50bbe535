"""Histograms filled once per iteration, compared with the Prometheus library's own."""

import math

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.metrics.engine_metrics import Histogram

BOUNDS = (0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 10.0)
VALUES = st.floats(0, 100) | st.sampled_from(BOUNDS) | st.just(0.0)


@given(st.lists(st.lists(VALUES, max_size=80), max_size=6))
def test_a_histogram_equals_that_of_the_library(chunks: list[list[float]]) -> None:
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram("x", "x", buckets=BOUNDS, registry=registry)
    ours = Histogram(BOUNDS)
    for chunk in chunks:
        ours.observe_all(chunk)
        for value in chunk:
            theirs.observe(value)
    counts, total = ours.read()
    cumulative = 0
    for bound, count in zip((*BOUNDS, math.inf), counts, strict=True):
        cumulative += count
        le = "+Inf" if bound == math.inf else str(bound)
        assert registry.get_sample_value("x_bucket", {"le": le}) == cumulative
    assert total == pytest.approx(registry.get_sample_value("x_sum"))


def test_observing_values_singly_or_together_is_the_same() -> None:
    values = [i * 0.03 for i in range(500)]
    one_by_one, at_once = Histogram(BOUNDS), Histogram(BOUNDS)
    for value in values:
        one_by_one.observe(value)
    at_once.observe_all(values)
    assert one_by_one.read()[0] == at_once.read()[0]
    assert one_by_one.read()[1] == pytest.approx(at_once.read()[1])
