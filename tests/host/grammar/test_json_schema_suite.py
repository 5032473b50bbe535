"""The JSON Schema Test Suite, drafts 2020-12 and 7: which instances the grammars take.

Every valid instance that is not taken has one of the reasons below, each with the number of its cases.
scripts/make_json_schema_suite.py makes the file.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from orca_jax.errors import InvalidSamplingParameter
from orca_jax.grammar import grammar as rooms
from orca_jax.grammar.schema_patterns import FORMATS, LIBRARY_FORMATS
from tests.host.grammar.json_texts import compiled, spelled, takes, takes_value
from tests.places import DATA

SUITE = json.loads(gzip.decompress((DATA / "json_schema_test_suite.json.gz").read_bytes()))["files"]
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
CONTROL = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")

# Valid instances that no output is, although the schema is followed.
NOT_WRITTEN = {
    "integers have no fraction and no exponent": 20,
    "properties have the schema's order": 7,
    "known formats are followed": 60,
    "control characters other than \\b \\f \\n \\r \\t": 8,
    "assertions of another vocabulary": 1,
}
# Valid instances of schemas that are refused with a 400, by what its message says.
REFUSED = {
    "uniqueItems": 46,
    "contains": 40,
    "oneOf": 20,
    "unevaluatedItems": 20,
    "unevaluatedProperties": 18,
    "$ref": 39,
    "$dynamicRef": 8,
    "patternProperties": 14,
    "not": 14,
    "minProperties": 5,
    "integer": 4,
    "control characters": 8,
}
_MESSAGES = {
    r"it has (uniqueItems|contains|unevaluatedItems|unevaluatedProperties|\$dynamicRef|minProperties):": None,
    r"it has not:|inside of not or if:": "not",
    "oneOf is for schemas that exclude each other": "oneOf",
    "patternProperty regexes .* are not disjoint": "patternProperties",
    r"\$ref '.*' is outside of the schema": "$ref",
    "an integer that floating-point numbers of 64 bits do not have": "integer",
}


@dataclass(frozen=True)
class Case:
    file: str
    schema: str
    name: str
    why: str


@dataclass
class Outcomes:
    n_right: int
    taken: list[Case]
    not_written: list[Case]
    refused: list[Case]


def is_note(file: str) -> bool:
    """Whether the file tests a format that is an annotation here, or the content of strings."""
    name = file.rpartition("/")[2].removesuffix(".json")
    is_format = "/optional/format/" in file and name not in FORMATS.keys() | LIBRARY_FORMATS
    return is_format or file.endswith("optional/content.json")


def why_not_written(schema: Any, instance: Any) -> str:
    """Find the reason by changing the instance or the schema."""
    grammar = compiled(schema)
    if CONTROL.search(spelled(instance).encode().decode("unicode_escape")):
        return "control characters other than \\b \\f \\n \\r \\t"
    if takes_value(grammar, instance):
        has_fraction = re.search(r"\d\.0\b|\de\+?\d", spelled(instance))
        return (
            "integers have no fraction and no exponent"
            if has_fraction
            else "properties have the schema's order"
        )
    is_known = schema.get("format") in FORMATS.keys() | LIBRARY_FORMATS
    if is_known and takes(compiled({**schema, "format": "unknown"}), spelled(instance)):
        return "known formats are followed"
    return "assertions of another vocabulary" if "localhost" in schema.get("$schema", "") else "?"


def why_refused(message: str, instance: Any) -> str:
    for pattern, reason in _MESSAGES.items():
        found = re.search(pattern, message)
        if found:
            return reason or found[1]
    has_control = CONTROL.search(spelled(instance).encode().decode("unicode_escape"))
    return "control characters" if has_control else message


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Outcomes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooms, "COMPILE_SECONDS", 60.0)
        yield run()


def run() -> Outcomes:
    found = Outcomes(0, [], [], [])
    for file, group in ((file, group) for file, groups in SUITE.items() for group in groups):
        schema = group["schema"]
        if file.startswith("draft7") and isinstance(schema, dict):
            schema = {"$schema": DRAFT_7, **schema}
        try:
            grammar = compiled(schema)
        except InvalidSamplingParameter as error:
            found.refused += [
                Case(file, spelled(schema), test["description"], why_refused(str(error), test["data"]))
                for test in group["tests"]
                if test["valid"] and schema is not False
            ]
            continue
        for test in group["tests"]:
            is_taken = takes(grammar, spelled(test["data"]))
            case = Case(file, spelled(schema), test["description"], "")
            if is_taken == (test["valid"] or is_note(file)):
                found.n_right += 1
            elif is_taken:
                found.taken.append(case)
            else:
                why = why_not_written(schema, test["data"])
                found.not_written.append(Case(file, spelled(schema), test["description"], why))
    return found


def test_no_invalid_instance_is_accepted(outcomes: Outcomes) -> None:
    assert outcomes.taken == []
    assert outcomes.n_right > 3000


def test_a_valid_instance_that_is_not_accepted_has_a_listed_reason(outcomes: Outcomes) -> None:
    assert Counter(case.why for case in outcomes.not_written) == NOT_WRITTEN


def test_a_schema_that_is_refused_has_a_listed_reason(outcomes: Outcomes) -> None:
    assert Counter(case.why for case in outcomes.refused) == REFUSED
