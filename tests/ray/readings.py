"""Readers of an application's /metrics."""

import time
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from tests.ray.conftest import SOON, Served


def metrics(served: Served) -> dict[str, dict[str, float]]:
    """Values at each replica, for each metric whose only label is the model's name."""
    page = served.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = dict[str, dict[str, float]]()
    for family in text_string_to_metric_families(page.text):
        for sample in family.samples:
            if sample.labels.keys() - {"model_name"} == {"replica"}:
                values.setdefault(sample.name, {})[sample.labels["replica"]] = sample.value
    return values


def n_generated(served: Served) -> float:
    """Tokens that all engines have generated."""
    return sum(metrics(served)["orca_generation_tokens_total"].values())


def n_live(served: Served) -> float:
    """Requests that run or wait on all engines."""
    return sum(metrics(served)["orca_live_streams"].values())


def until(condition: Callable[[], bool], seconds: float = SOON) -> float:
    """Wait until `condition()`; return how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds
        time.sleep(0.02)
    return time.monotonic() - began
