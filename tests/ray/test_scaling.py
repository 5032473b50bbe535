"""The number of engines for a load: tables worked by hand, and Ray's delays and bounds."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.config import AutoscalingContext

from orca_jax.errors import ConfigError
from server.ray.app import ENGINE, build_app
from server.ray.scaling import LOAD, LoadPolicy, engines_for
from server.ray.settings import ReplicaOptions


@pytest.mark.parametrize(
    ("loads", "target", "wanted"),
    [
        ([], 0.7, 1),
        ([0.0], 0.7, 1),
        ([0.7], 0.7, 1),
        ([0.71], 0.7, 2),
        ([0.1, 0.1, 0.1], 0.1, 3),  # a little above 3 in floating point
        ([0.7, 0.7], 0.7, 2),
        ([0.1, 0.1, 0.1], 0.7, 1),
        ([0.5, 0.5, 0.5], 0.7, 3),  # 1.5 / 0.7 = 2.14
        ([0.4, 0.4, 0.4], 0.7, 2),
        ([3.0], 0.7, 5),  # requests wait: three engines' work in one
        ([3.0, 0.0, 0.0], 0.7, 5),  # it is the same work if two new engines have none of it yet
        ([1.0, 1.0], 1.0, 2),
        ([0.2], 0.1, 2),
    ],
)
def test_engines_for_a_load(loads: list[float], target: float, wanted: int) -> None:
    assert engines_for(loads, target=target) == wanted


@given(st.lists(st.floats(0, 20), max_size=8), st.floats(0.05, 1.0))
def test_the_wanted_engines_suffice_and_one_less_does_not(loads: list[float], target: float) -> None:
    n, total = engines_for(loads, target=target), math.fsum(loads)
    assert total / n <= target * (1 + 1e-6)
    assert n == 1 or total / (n - 1) > target * (1 - 1e-6)


def context(loads: dict[str, float] | None, n_now: int) -> AutoscalingContext:
    values: dict[str, Any] = dict.fromkeys(AutoscalingContext.__init__.__annotations__)
    values.pop("return", None)
    values |= {"target_num_replicas": n_now, "current_num_replicas": n_now}
    values["aggregated_metrics"] = None if loads is None else {LOAD: loads}
    return AutoscalingContext(**values)


def test_the_policy_reads_the_replicas_reports() -> None:
    policy = LoadPolicy(0.5)
    assert policy(context({"a": 0.6, "b": 0.6}, 2)) == (3, {})
    assert policy(context({"a": 0.1, "b": 0.0}, 2)) == (1, {})


@pytest.mark.parametrize("loads", [None, {}])
def test_without_reports_the_number_of_engines_stays(loads: dict[str, float] | None) -> None:
    assert LoadPolicy(0.5)(context(loads, 3)) == (3, {})


def test_the_application_scales_between_its_bounds() -> None:
    args = {"min_replicas": "2", "max_replicas": "5", "target_load": "0.6", "upscale_delay": 1}
    app: Any = build_app(args)
    engine = app._bound_deployment.init_args[0]._bound_deployment
    assert engine.name == ENGINE
    scaling = engine._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.initial_replicas) == (2, 5, 2)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (1.0, 300.0)
    policy = scaling.policy.get_policy()
    policy = policy(**scaling.policy.policy_kwargs) if isinstance(policy, type) else policy
    assert policy(context({"a": 1.2}, 2)) == (2, {}) and policy(context({"a": 1.9}, 2)) == (4, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_replicas": 1}, "give both"),
        ({"min_replicas": 3, "max_replicas": 2}, "in this order"),
        ({"min_replicas": 0, "max_replicas": 2}, "at least 1"),
        ({"target_load": 0.0}, "above 0"),
        ({"target_load": math.nan}, "above 0"),
        ({"upscale_delay": -1.0}, "upscale_delay is -1; it must be from 0"),
        ({"downscale_delay": math.inf}, "downscale_delay is inf"),
        ({"load_window": 10.0}, "load_window is 10; it must be above 10 seconds"),
        ({"num_replicas": 0}, "at least 1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplicaOptions(**options)
