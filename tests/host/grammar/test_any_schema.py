"""Random schemas against another validator: outputs are valid, and every valid value can be an output."""

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from orca_jax.errors import InvalidSamplingParameter
from orca_jax.grammar import grammar as rooms
from orca_jax.grammar.grammar import Grammar
from tests.host.grammar.any_schema import any_schema, any_value, is_well_founded
from tests.host.grammar.json_texts import END, N_TOKENS, compiled, takes_value

N_SCHEMAS = 250


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooms, "COMPILE_SECONDS", 60.0)
        yield


def followed(seeds: range) -> Iterator[tuple[random.Random, dict[str, Any], Grammar]]:
    """The schemas that are not refused."""
    for seed in seeds:
        rng = random.Random(seed)
        schema = any_schema(rng)
        try:
            grammar = compiled(schema)
        except InvalidSamplingParameter:
            continue
        yield rng, schema, grammar


def output(grammar: Grammar, rng: random.Random) -> str | None:
    """An output of random bytes, towards its end as soon as may be; None if it has none within 300."""
    state, mask, text = grammar.start(), np.zeros(-(-N_TOKENS // 32), np.int32), bytearray()
    for n in range(300):
        state.allowed(mask)
        assert state.failure is None, (bytes(text), state.failure)
        tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        closing = [token for token in tokens if token == END or token in b'"}],:']
        token = rng.choice(closing if closing and n > 40 else tokens)
        text += bytes([token]) if token != END else b""
        if state.accept(token):
            assert state.failure is None
            return text.decode()
    return None


def finite(number: str) -> float:
    """Random exponents make numbers that are valid, and greater than any float."""
    return min(max(float(number), -1.7e308), 1.7e308)


def test_an_output_is_valid_and_never_stuck() -> None:
    n_outputs = 0
    for rng, schema, grammar in followed(range(N_SCHEMAS)):
        validator = jsonschema_rs.Draft202012Validator(schema)
        for _ in range(3):
            text = output(grammar, rng)
            if text is not None:
                n_outputs += 1
                assert validator.is_valid(json.loads(text, parse_float=finite)), (schema, text)
    assert n_outputs > N_SCHEMAS


def test_a_grammar_takes_the_valid_values_and_no_others() -> None:
    n_valid = 0
    for rng, schema, grammar in followed(range(10_000, 10_000 + N_SCHEMAS)):
        validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
        for _ in range(15):
            value = any_value(rng)
            is_valid = validator.is_valid(value)
            n_valid += is_valid
            assert takes_value(grammar, value) == is_valid or not is_well_founded(schema), (schema, value)
    assert n_valid > N_SCHEMAS


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_that_holds_for_thousands() -> None:
    for rng, schema, grammar in followed(range(20_000, 26_000)):
        validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
        text = output(grammar, rng)
        assert text is None or validator.is_valid(json.loads(text, parse_float=finite)), (schema, text)
        for value in [any_value(rng) for _ in range(5 * is_well_founded(schema))]:
            assert takes_value(grammar, value) == validator.is_valid(value), (schema, value)
