"""Scheduling parameters: priorities and cache salts."""

from typing import Any

import pytest

from orca_jax.errors import InvalidSchedulingParameter
from orca_jax.request.scheduling_params import SchedulingParams

LOW, HIGH = -(1 << 31), (1 << 31) - 1


@pytest.mark.parametrize(
    "fields", [{}, {"priority": LOW}, {"priority": HIGH}, {"cache_salt": "x"}, {"cache_salt": "é" * 512}]
)
def test_the_limits_themselves_are_accepted(fields: dict[str, Any]) -> None:
    params = SchedulingParams(**fields)
    assert {name: getattr(params, name) for name in fields} == fields


@pytest.mark.parametrize("priority", [LOW - 1, HIGH + 1, 10**400, 1.0, True, "1", None])
def test_a_priority_that_is_no_32_bit_integer_is_rejected(priority: Any) -> None:
    with pytest.raises(InvalidSchedulingParameter, match=f"from {LOW} to {HIGH}") as caught:
        SchedulingParams(priority=priority)
    assert caught.value.param == "priority"


@pytest.mark.parametrize("salt", ["", "secret" * 86, 5, b"x", ["x"]])
def test_a_salt_of_another_type_or_length_is_rejected_and_not_shown(salt: Any) -> None:
    with pytest.raises(InvalidSchedulingParameter, match="cache_salt") as caught:
        SchedulingParams(cache_salt=salt)
    assert caught.value.param == "cache_salt"
    assert "secret" not in str(caught.value)


def test_a_priority_without_effect_is_rejected() -> None:
    SchedulingParams(priority=-3).check_policy("priority")
    for policy in ("fcfs", "fair"):
        SchedulingParams(cache_salt="x").check_policy(policy)
        with pytest.raises(InvalidSchedulingParameter, match=f"policy is '{policy}'") as caught:
            SchedulingParams(priority=-3).check_policy(policy)
        assert caught.value.param == "priority"
