"""Parsing JSON at a bounded cost: what counts towards the limits, and that the cost is linear."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from server.http.bodies import json_text
from server.http.bodies.json_text import members, parse

marks = st.text('",:[]{}\\/\x7fé\n\U0001f600ab', max_size=12)
values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | marks,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(marks, inner, max_size=5),
    max_leaves=40,
)


def counts(value: Any) -> tuple[int, int, int]:
    """The counts of values, names and containers, computed from the parsed value."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = list(value.values()) if isinstance(value, dict) else value
    below = [counts(each) for each in inner]
    n_names = len(value) if isinstance(value, dict) else 0
    return (
        max(0, len(inner) - 1) + 1 + sum(n for n, _, _ in below),
        n_names + sum(n for _, n, _ in below),
        1 + sum(n for _, _, n in below),
    )


@given(values, st.booleans(), st.sampled_from(["MAX_VALUES", "MAX_NAMES", "MAX_CONTAINERS"]))
def test_everything_counts_except_the_contents_of_strings(value: Any, ascii: bool, name: str) -> None:
    data = json.dumps(value, ensure_ascii=ascii).encode()
    n = counts(value)[["MAX_VALUES", "MAX_NAMES", "MAX_CONTAINERS"].index(name)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "COUNTED_FROM", 0)
        patch.setattr(json_text, name, n)
        assert parse(data) == value
        if n:
            patch.setattr(json_text, name, n - 1)
            with pytest.raises(HTTPException, match=f"more than {n - 1} ") as caught:
                parse(data)
            assert caught.value.status_code == 413


@given(values, st.booleans())
def test_json_written_by_python_round_trips(value: Any, ascii: bool) -> None:
    assert parse(json.dumps(value, ensure_ascii=ascii).encode()) == value


surrogates = st.lists(
    st.sampled_from([r"\ud83d", r"\uDE00", r"\\", r"\"", "a", r"\ud7ff", "😀", r"\uD83d\ude00"])
)


@given(
    value=st.dictionaries(marks, values, max_size=3),
    indent=st.sampled_from([None, 0, 3]),
)
def test_members_are_the_object_and_their_texts_its_parts(value: dict[str, Any], indent: int | None) -> None:
    data = json.dumps(value, indent=indent).encode()
    found = members(b" " + data + b"\n")
    assert {name: one for name, (one, _) in found.items()} == value
    assert all(parse(text) == value[name] for name, (_, text) in found.items())


@pytest.mark.parametrize(
    "data",
    [b"", b" ", b"[]", b"1", b"{", b'{"a"', b'{"a":', b'{"a":1', b'{"a":1,', b'{"a":1,}', b'{"a":1 "b":2}']
    + [b'{"a" 1}', b"{a:1}", b'{"a":1}x', b'{"a":1,"a":2}', b'{"a":nan}', b'{"a":"\xff"}', b'{"a":"\\ud800"}']
    + [b'{"a":' + b"[" * 100_000, b'{"a":' + b"[1]" * 6000 + b"}", b'{,"a":1}', b'{"a":{"b":1,"b":2}}'],
)
def test_members_of_anything_but_an_object_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        members(data)


@given(surrogates, surrogates)
def test_a_lone_surrogate_is_found_anywhere(name: list[str], text: list[str]) -> None:
    data = f'[{{"{"".join(name)}": ["{"".join(text)}"]}}]'.encode()
    value = json.loads(data)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        with pytest.raises(HTTPException, match="surrogate"):
            parse(data)
    else:
        assert parse(data) == value


class Name(str):
    """Counts comparisons of names."""

    n_compared = 0

    def __eq__(self, other: object) -> bool:
        Name.n_compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_a_duplicate_name_is_found_in_one_pass() -> None:
    names = [Name(f"name {i}") for i in range(json_text.MAX_NAMES_OF_ONE - 1)]
    Name.n_compared = 0
    with pytest.raises(ValueError, match="the name 'name 4998' twice"):
        json_text._object([(name, 0) for name in [*names, Name(names[-1])]])
    assert Name.n_compared < 100


LARGE = {
    "128 prompts of 2,000 token ids": [[random.Random(i).randrange(50_000)] * 2000 for i in range(128)],
    "a prompt of 131,072": list(range(131_072)),
    "256,000 token ids": list(range(256_000)),
    "a text of marks": '",:[{' * 700_000,
    "a text of backslashes": "\\" * 1_900_000,
    "a schema": {"properties": {f"name {i}": {"type": "string"} for i in range(2000)}},
    "a long conversation": [{"role": "user", "content": "x" * 600}] * 4900,
    "a long conversation of one word each": [{"role": "user", "content": "a"}] * 20_000,
    "biases": {str(i): 1 for i in range(4096)},
}


@pytest.mark.parametrize("value", LARGE.values(), ids=LARGE)
def test_ordinary_requests_are_far_below_the_limits(value: Any) -> None:
    assert parse(json.dumps({"a": value}).encode()) == {"a": value}


TOO_MUCH = {
    "numbers": (b"[" + b"1," * 1_100_000 + b"1]", 413, "1000000 values"),
    "empty strings": (b"[" + b'"",' * 1_100_000 + b'""]', 413, "1000000 values"),
    "lists": (b"[" + b"[]," * 6000 + b"[]]", 413, "5000 lists and objects in 18004 bytes, one for each 16"),
    "lists, deep": (b"[" * 900 + b"[]," * 6000, 413, "5000 lists and objects"),
    "lists in a long body": (b"[" + b"[]," * 90_000 + b'"' + b"x" * 900_000 + b'"]', 413, "73125 lists"),
    "messages": (b"[" + b'{"role":"user","content":""},' * 100_001 + b"{}]", 413, "200000 names"),
    "many lists": (b"[" + b'["",1234567890123],' * 100_001 + b"[]]", 413, "100000 lists and objects"),
    "names": (b"[" + b'{"a":1},' * 10_000 + b"{}]", 413, "5000 lists and objects"),
    "short names": (b"[" + b'{"":1,"a":2,"b":3,"c":4},' * 4_000 + b"{}]", 413, "12500 names in 100004 bytes"),
    "many names": (b"[" + b'{"a":"","b":"","c":"","d":""},' * 50_001 + b"{}]", 413, "200000 names"),
    "names of one": (b"{" + b",".join(b'"%d":1' % i for i in range(5001)) + b"}", 400, "5001 names"),
    "digits": (b"[" + b"9" * 1001 + b"]", 400, "more than 1000 digits"),
    "no end": (b'{"a": [' + b"1," * 1_100_000, 413, "1000000 values"),
    "a string without an end": (b'["' + b"," * 3_000_000, 400, "Unterminated string"),
}


@pytest.mark.parametrize("data, status, message", TOO_MUCH.values(), ids=TOO_MUCH)
def test_bodies_that_would_hold_the_gil_are_rejected(data: bytes, status: int, message: str) -> None:
    with pytest.raises(HTTPException, match=message) as caught:
        parse(data)
    assert caught.value.status_code == status
