"""The ranges of parameters: every value that a device divides by or compares with is finite in float32."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from orca_jax.errors import InvalidSamplingParameter
from orca_jax.request.sampling_params import (
    MAX_BAD_WORDS,
    REPETITION_RANGE,
    TEMPERATURE_RANGE,
    TOP_P_RANGE,
    SamplingParams,
)

RANGES = {"temperature": TEMPERATURE_RANGE, "top_p": TOP_P_RANGE, "repetition_penalty": REPETITION_RANGE}
TINY = np.finfo(np.float32).tiny


@pytest.mark.parametrize("name", RANGES)
def test_both_ends_of_a_range_are_numbers_that_a_float32_can_divide_by(name: str) -> None:
    for value in RANGES[name]:
        given: dict[str, Any] = {name: value}
        stored = np.float32(getattr(SamplingParams(**given), name))
        assert stored >= TINY and np.isfinite(np.float32(1e28) / stored)


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize(
    "value", [1e-50, 1e-45, 1e-38, -1e-45, float("nan"), float("inf"), 10**400, True, "1"]
)
def test_values_that_vanish_in_float32_are_refused(name: str, value: Any) -> None:
    low, high = RANGES[name]
    with pytest.raises(InvalidSamplingParameter, match=f"from {low:g} to {high:g}") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["min_p", "frequency_penalty", "presence_penalty"])
def test_values_that_vanish_in_float32_are_off(name: str) -> None:
    given: dict[str, Any] = {name: 1e-50}
    assert np.float32(getattr(SamplingParams(**given), name)) == 0


def test_bad_words_are_bounded_together() -> None:
    half = "x" * 1024
    SamplingParams(bad_words=(half,) * 8)
    with pytest.raises(InvalidSamplingParameter, match=f"8193 characters; .* {MAX_BAD_WORDS} together"):
        SamplingParams(bad_words=(*[half] * 8, "y"))


LONG: dict[str, Any] = {
    "a text of JSON": {"guided_json": "[" + "[]," * 1_000_000 + "[]]"},
    "a schema": {"guided_json": {"enum": list(range(400_000))}},
    "a list for a text": {"guided_regex": list(range(4_000_000))},
    "a list of lists": {"stop": [[list(range(1_000_000))]]},
    "nested": {"logit_bias": {5: {"a": list(range(1_000_000))}}},
    "a long text": {"bad_words": "x" * 4_000_000},
}


@pytest.mark.parametrize("fields", LONG.values(), ids=LONG)
def test_no_more_of_a_wrong_value_is_read_than_is_shown(fields: dict[str, Any]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidSamplingParameter) as caught:
            SamplingParams(**fields)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 400
    assert peak < 12_000_000  # 30 MB and more where all of it is written down, or read as JSON
