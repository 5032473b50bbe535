"""JSON schemas as people write them: which uses of each keyword are supported, and why others are refused."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from orca_jax.errors import InvalidSamplingParameter
from orca_jax.grammar import grammar as rooms
from orca_jax.grammar import json_schema, schema_looks
from orca_jax.grammar.json_schema import followed
from orca_jax.grammar.schema_document import CannotFollow
from orca_jax.grammar.schema_patterns import NamePattern, has_other_names, rust_pattern
from orca_jax.grammar.schema_values import NOT_BUILT
from tests.host.grammar.json_texts import compiled, next_bytes, takes


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooms, "COMPILE_SECONDS", 60.0)
        yield


def check(schema: Any, *, taken: tuple[str, ...] = (), others: tuple[str, ...] = ()) -> None:
    grammar = compiled(schema)
    assert [text for text in taken if not takes(grammar, text)] == []
    assert [text for text in others if takes(grammar, text)] == []


def why_refused(schema: Any) -> str:
    with pytest.raises(InvalidSamplingParameter, match="guided_json cannot be followed: ") as caught:
        compiled(schema)
    assert caught.value.param == "guided_json"
    return str(caught.value)


# Formats and annotations.


@pytest.mark.parametrize(
    "name",
    [
        "password",
        "path",
        "binary",
        "byte",
        "uri-reference",
        "regex",
        "int64",
        "uuid4",
        "credit-card",
        "",
        "float",
    ],
)
def test_an_unknown_format_is_an_annotation(name: str) -> None:
    schema = {"type": "object", "properties": {"k": {"type": "string", "format": name}}, "required": ["k"]}
    check(schema, taken=('{"k":"~ anything"}', '{"k":""}'), others=('{"k":1}',))


KNOWN = {
    "date": ("2024-02-29", "2023-02-29"),
    "time": ("23:59:59.5+01:00", "23:59:60Z"),
    "date-time": ("2000-02-29T00:00:00Z", "1900-02-29T00:00:00Z"),
    "duration": ("P1DT2H", "1 day"),
    "email": ("a.b@example.com", "a.b"),
    "hostname": ("a--b.example.com", "-a.example"),
    "ipv4": ("127.0.0.1", "127.0.0.256"),
    "ipv6": ("::ffff:192.168.0.1", "1::2::3"),
    "uri": ("urn:a:b", "a b"),
    "uuid": ("2eb8aa08-aa98-11ea-b4aa-73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_format_is_followed_together_with_other_keywords(name: str) -> None:
    good, bad = KNOWN[name]
    check({"format": name}, taken=(f'"{good}"', "1", "null"), others=(f'"{bad}"',))
    check(
        {"type": "string", "format": name, "pattern": "1|a|2", "maxLength": 60},
        taken=(f'"{good}"',),
        others=(f'"{bad}"',),
    )


def test_annotations_change_nothing() -> None:
    notes = {
        **{"title": "t", "description": "d", "default": 1, "examples": [2], "deprecated": True},
        **{"readOnly": True, "$comment": "c", "contentMediaType": "application/json", "nullable": True},
        **{
            "x-order": 3,
            "discriminator": {"propertyName": "k"},
            "$dynamicAnchor": "n",
            "example": {"type": "null"},
        },
    }
    assert followed({**notes, "type": "string"}) == {"type": "string"}
    assert followed(notes) == {}


# Numbers.


def test_a_number_without_a_fraction_is_an_integer() -> None:
    check(
        {"type": "integer", "minimum": 1.0, "maximum": 3.0, "multipleOf": 1.0},
        taken=("1", "3"),
        others=("4",),
    )
    check({"type": "string", "minLength": 1.0, "maxLength": 2.0}, taken=('"ab"',), others=('""', '"abc"'))
    check({"type": "array", "minItems": 1.0, "maxItems": 2.0}, taken=("[1]",), others=("[]", "[1,2,3]"))
    check({"type": "integer", "const": 2.0}, taken=("2",), others=("1", "2.5"))
    check({"type": "integer", "enum": [1.0, 2.5, 3.0]}, taken=("1", "3"), others=("2.5", "2"))
    check({"enum": [[0.0], {"k": 4.0}]}, taken=("[0]", '{"k":4}'), others=("[false]",))
    check({"type": "number", "const": 1.5}, taken=("1.5",), others=("1", "2"))
    check({"type": "integer", "exclusiveMinimum": True, "minimum": 1}, taken=("2",), others=("1",))


@pytest.mark.parametrize(
    "schema",
    [{"const": 2**53 + 1}, {"minimum": -(2**53) - 1}, {"enum": [1, 2**70 + 1]}, {"maximum": 10**400}],
)
def test_an_integer_that_64_bits_do_not_have_is_refused(schema: Any) -> None:
    """llguidance would round it to another integer."""
    assert "floating-point numbers of 64 bits do not have" in why_refused(schema)


# Constants.


def test_a_constant_object_has_its_keys_in_any_order() -> None:
    value = {"a": 1, "b": [{"c": "x", "d": None}], "e": {"f": 2.0, "g": 3}}
    grammar = compiled({"const": value})
    for outer in itertools.permutations(value):
        for inner in itertools.permutations(("f", "g")):
            parts = {
                "a": '"a": 1',
                "b": '"b": [{"d": null, "c": "x"}]',
                "e": '"e": {' + ", ".join({"f": '"f": 2', "g": '"g": 3'}[key] for key in inner) + "}",
            }
            assert takes(grammar, "{" + ", ".join(parts[key] for key in outer) + "}")
    assert not takes(grammar, '{"a":1,"a":1,"e":{"f":2,"g":3}}')
    check({"enum": [{"a": 1, "b": 2}, 5]}, taken=('{"b":2,"a":1}', "5"), others=('{"a":1}', '{"b":2,"a":2}'))


def test_a_constant_with_many_keys_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    many = dict.fromkeys("abcde", 1)
    check({"const": many}, taken=(json.dumps(many),), others=(json.dumps(dict(reversed(many.items()))),))
    monkeypatch.setattr(json_schema, "MAX_ALL_ORDERS", 7)
    three, two = {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2}
    orders = json.dumps(followed({"prefixItems": [{"const": three}, {"const": two}]}))
    assert orders.count("additionalProperties") == 6 + 1


# Names of properties.

MEETING = {
    "type": "object",
    "properties": {"a": {"const": 1}},
    "additionalProperties": False,
    "patternProperties": {"^a$": {"type": "integer"}},
}


def test_a_pattern_of_listed_names_alone_offers_no_other() -> None:
    check(MEETING, taken=('{"a":1}', "{}"), others=('{"a":2}', '{"a":1,"a":1}'))
    required = {**MEETING, "properties": {}, "required": ["a"]}
    check(required, taken=('{"a":7}',), others=("{}", '{"a":"7"}'))
    assert next_bytes(compiled(required), '{"a":7 ') == b"}"
    two = {**MEETING, "patternProperties": {"^(a|b)$": {"type": "integer"}}}
    check(two, taken=('{"a":1}', '{"b":3}', '{"a":1,"b":3}'), others=('{"c":3}', '{"b":"3"}'))


@pytest.mark.parametrize("pattern", ["", ".*", "^[\\s\\S]*$"])
def test_a_pattern_that_every_name_has_is_for_all_properties(pattern: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"maximum": 5}},
        "patternProperties": {pattern: {"type": "integer"}, "^b": {"minimum": 2}},
        "additionalProperties": {"type": "null"},
    }
    check(
        schema,
        taken=('{"a":5}', '{"b":2,"x":-1}'),
        others=('{"a":6}', '{"a":"1"}', '{"b":1}', '{"x":null}'),
    )


def test_patterns_that_leave_no_name_leave_no_further_property() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "patternProperties": {"^[^a]": False, "^$": False, "^a[\\s\\S]": False},
    }
    check(schema, taken=("{}", '{"a":1}'), others=('{"a":1,"b":2}', '{"b":1}'))
    assert next_bytes(compiled(schema), '{"a":1') == b" }"


def test_patterns_with_one_schema_may_overlap() -> None:
    schema = {"type": "object", "additionalProperties": False}
    same = {**schema, "patternProperties": {"^a": {"type": "null"}, "b$": {"type": "null"}}}
    check(same, taken=('{"ab":null}', '{"xb":null}'), others=('{"x":null}', '{"ab":1}'))
    other = {**schema, "patternProperties": {"^a": {"type": "null"}, "b$": {"type": "integer"}}}
    assert "are not disjoint" in why_refused(other)


def test_a_name_spelled_with_escapes_is_no_other_name() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    check(schema, taken=('{"a":1,"b":"x"}',), others=(r'{"\u0061":"x"}', r'{"b":1,"\u0061":"x"}'))
    check({"type": "object", "patternProperties": {"^a": False}}, others=(r'{"\u0061":1}', '{"ab":1}'))


def test_property_names_restrict_the_keys() -> None:
    words = {"type": "object", "additionalProperties": {"type": "integer"}}
    for names in ({"type": "string"}, {}, True, {"format": "password"}):
        check({**words, "propertyNames": names}, taken=('{"x":1}', "{}"), others=('{"x":"1"}',))
    listed = {"$defs": {"E": {"enum": ["b", "a", 5]}}, **words, "propertyNames": {"$ref": "#/$defs/E"}}
    check(listed, taken=('{"b":1,"a":2}', '{"a":2}'), others=('{"c":1}', '{"a":null}'))
    pattern: dict[str, Any] = {
        "type": "object",
        "properties": {"c": True},
        "propertyNames": {"pattern": "^a"},
    }
    check({**words, **pattern}, taken=('{"ab":1}',), others=('{"c":1}', '{"x":1}', '{"ab":"x"}'))
    pattern["properties"] = {"ab": {"type": "null"}}
    check(pattern, taken=('{"ab":null,"ax":"1"}',), others=('{"ab":1}', '{"x":1}'))
    assert "it has propertyNames" in why_refused({**words, **pattern})
    check(
        {**words, "propertyNames": {"minLength": 2, "maxLength": 3}}, taken=('{"éé":1}',), others=('{"é":1}',)
    )
    check({**words, "propertyNames": {"format": "uuid"}}, others=('{"x":1}',))
    check({**words, "propertyNames": False}, taken=("{}",), others=('{"x":1}',))
    check({**words, "propertyNames": {"type": "integer"}}, taken=("{}",), others=('{"x":1}',))
    assert "it has propertyNames" in why_refused({**words, "propertyNames": {"not": {"const": "x"}}})


def test_dependencies_require_other_properties() -> None:
    for schema in (
        {"dependentRequired": {"card": ["address"]}},
        {"dependencies": {"card": ["address"]}},
        {"dependentSchemas": {"card": {"required": ["address"]}}},
        {"dependencies": {"card": {"required": ["address"]}}},
    ):
        check(
            {"type": "object", "properties": {"card": True, "address": True}, **schema},
            taken=("{}", '{"address":1}', '{"card":1,"address":2}'),
            others=('{"card":1}',),
        )
        check(schema, taken=("1", "[]"))


def test_unevaluated_properties_are_closed_or_have_a_schema() -> None:
    base = {"properties": {"id": {"type": "integer"}}, "required": ["id"]}
    schema = {
        "$defs": {"base": base},
        "type": "object",
        "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"name": {"type": "string"}}}],
        "unevaluatedProperties": False,
    }
    check(schema, taken=('{"id":1,"name":"x"}', '{"id":1}'), others=('{"id":1,"more":2}',))
    check({**schema, "unevaluatedProperties": {"type": "null"}}, taken=('{"id":1,"more":null}',))
    check({**schema, "additionalProperties": True}, taken=('{"id":1,"more":2}',))
    assert "it has unevaluatedProperties" in why_refused({**schema, "anyOf": [{"properties": {"x": True}}]})


def test_more_properties_than_are_required_may_be_one_at_most() -> None:
    check({"type": "object", "minProperties": 1}, taken=('{"x":1}',), others=("{}",))
    check({"type": "object", "required": ["a"], "minProperties": 1}, taken=('{"a":1}',), others=("{}",))
    assert "names that are not listed may come twice" in why_refused({"type": "object", "minProperties": 2})


# References.


def test_references_are_resolved_as_the_standard_says() -> None:
    schema = {
        "$id": "https://example.com/root",
        "type": "object",
        "properties": {
            "pointer": {"$ref": "#/components/schemas/a~1b"},
            "anchor": {"$ref": "#here"},
            "inner": {"$ref": "inner"},
            "item": {"$ref": "#/prefixItems/1"},
            "dynamic": {"$dynamicRef": "#one"},
        },
        "components": {"schemas": {"a/b": {"type": "string", "format": "path"}}},
        "prefixItems": [True, {"const": 4.0}],
        "$defs": {
            "x": {"$anchor": "here", "type": "null"},
            "y": {"$id": "inner", "$ref": "#/$defs/z", "$defs": {"z": {"type": "boolean"}}},
            "z": {"$dynamicAnchor": "one", "type": "array", "items": {"$dynamicRef": "#one"}},
        },
    }
    whole = '{"pointer":"a","anchor":null,"inner":true,"item":4,"dynamic":[[],[[]]]}'
    check(
        schema, taken=(whole,), others=('{"pointer":1}', '{"anchor":1}', '{"inner":null}', '{"dynamic":[1]}')
    )


@pytest.mark.parametrize(
    "dialect, is_old", [("draft-04", True), ("draft-07", True), ("draft/2020-12", False)]
)
def test_keywords_next_to_a_reference_count_since_2019(dialect: str, is_old: bool) -> None:
    schema = {
        "$schema": f"https://json-schema.org/{dialect}/schema#",
        "definitions": {"list": {"type": "array"}},
        "properties": {"a": {"$ref": "#/definitions/list", "maxItems": 1}},
        "type": "object",
    }
    assert takes(compiled(schema), '{"a":[1,2]}') == is_old


@pytest.mark.parametrize(
    "reference, why",
    [
        ("#/$defs/none", "names nothing in the schema"),
        ("#none", "names nothing in the schema"),
        ("#/$defs/a/9", "names nothing in the schema"),
        ("other.json", "is outside of the schema; copy what it names into $defs"),
        (5, "$ref is not a text"),
    ],
)
def test_a_reference_to_nothing_is_refused(reference: Any, why: str) -> None:
    assert why in why_refused({"$ref": reference, "$defs": {"a": [1]}})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {
            "$defs": {"m": {"$ref": "#/$defs/m"}},
            "properties": {"x": {"$ref": "#/$defs/m"}},
            "required": ["x"],
        },
        {
            "allOf": [
                {"type": "object"},
                {"properties": {"x": {"$ref": "#"}}, "required": ["x"], "type": "object"},
            ]
        },
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"anyOf": [{"$ref": "#"}, False]},
    ],
)
def test_a_schema_without_a_value_that_ends_is_refused(schema: dict[str, Any]) -> None:
    if "x" in schema.get("properties", {}):
        schema = {"type": "object", **schema}
    assert "no value is valid by it, or only infinite ones" in why_refused(schema)


def test_a_property_without_a_value_that_ends_is_left_out() -> None:
    """Otherwise the output would begin it and never end."""
    endless = {"type": "object", "properties": {"x": {"$ref": "#/$defs/e"}}, "required": ["x"]}
    schema = {
        "$defs": {"e": endless, "m": {"$ref": "#/$defs/m"}},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/e"}, "b": {"$ref": "#/$defs/m"}, "c": {"type": "null"}},
        "additionalProperties": False,
    }
    check(schema, taken=('{"c":null}', "{}"))
    assert next_bytes(compiled(schema), '{"') == b"c"
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"anyOf": [{"$ref": "#"}, {}]}}}
    check({**tree, "required": ["right"]}, taken=('{"left":{"right":1},"right":{"right":null}}',))


# Alternatives.

CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}, "name": {"type": "string"}}}


def test_alternatives_that_exclude_each_other() -> None:
    check({"oneOf": [{"const": 1, "title": "low"}, {"const": 2.0}, {"const": "1"}]}, taken=("1", "2", '"1"'))
    check(
        {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "number", "exclusiveMinimum": 3}]},
        taken=("3", "4"),
    )
    many = {"oneOf": [{"const": f"code {i}"} for i in range(300)]}
    check(many, taken=('"code 299"',), others=('"code 300"',))
    assert "oneOf is for schemas that exclude each other" in why_refused(
        {"oneOf": [{"minimum": 1}, {"maximum": 1}]}
    )


def test_a_property_that_tells_alternatives_apart_is_always_written() -> None:
    """Without it an object would be valid for both alternatives, and so not for oneOf."""
    required = {"oneOf": [{**CAT, "required": ["kind"]}, {**DOG, "required": ["kind"]}]}
    optional = {
        "$defs": {"cat": CAT, "dog": DOG},
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    }
    for schema in (required, optional):
        check(
            schema,
            taken=('{"kind":"cat","lives":9}', '{"kind":"wolf"}'),
            others=("{}", '{"lives":9}', '{"kind":"cow"}', '{"kind":"cat","lives":"9"}'),
        )


def test_not_excludes_the_values_of_a_schema() -> None:
    assert "no value" in why_refused({"not": {}})
    check({"not": False}, taken=("1",))
    check({"not": {"type": ["string", "null"]}}, taken=("1", "[]"), others=('"a"', "null"))
    check({"not": {"not": {"type": "string"}}}, taken=('"a"',), others=("1",))
    check(
        {"not": {"enum": [1, None, True]}}, taken=("2", "1.5", "false", '"1"'), others=("1", "null", "true")
    )
    check({"type": "string", "not": {"const": ""}}, taken=('"a"',), others=('""',))
    check({"type": "number", "not": {"minimum": 5}}, taken=("4.5",), others=("5", "6"))
    check({"type": "string", "not": {"maxLength": 2}}, taken=('"abc"',), others=('"ab"',))
    forbidden = {
        "type": "object",
        "properties": {"a": {"not": {}}, "b": True},
        "not": {"required": ["b", "c"]},
    }
    check(forbidden, taken=('{"b":1}', '{"c":1}'), others=('{"a":1}', '{"b":1,"c":1}'))
    check(
        {"not": {"properties": {"a": {"type": "null"}}}}, taken=('{"a":1}',), others=("{}", '{"a":null}', "1")
    )
    check(
        {"type": "integer", "not": {"anyOf": [{"const": 1}, {"const": 2}]}}, taken=("3",), others=("1", "2")
    )
    inner = {
        "properties": {"kind": {"enum": ["a", "b"]}, "x": {}},
        "not": {"properties": {"x": {"const": 1}}},
    }
    check(inner, taken=('{"x":2}', '{"kind":"a","x":2}'), others=('{"x":1}', "1"))
    nested = {**inner, "not": {"properties": {"x": {"properties": {"kind": {"const": "a"}}}}}}
    assert NOT_BUILT["not"] in why_refused(nested), "the values of another property of that name say nothing"
    assert NOT_BUILT["not"] in why_refused({"not": {"pattern": "a"}})


def test_if_then_else() -> None:
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["card", "cash"]},
            "number": {"type": "string"},
            "by": {"type": "null"},
        },
        "required": ["kind"],
        "if": {"properties": {"kind": {"const": "card"}}},
        "then": {"required": ["number"]},
        "else": {"required": ["by"]},
        "additionalProperties": False,
    }
    check(
        schema,
        taken=('{"kind":"card","number":"1"}', '{"kind":"cash","by":null}'),
        others=('{"kind":"card"}', '{"kind":"cash"}', '{"kind":"card","by":null}'),
    )
    check({"if": {"maximum": 0}, "then": {"minimum": -5}}, taken=("-5", "7", '"a"'), others=("-6",))
    check({"if": True, "then": {"type": "null"}}, taken=("null",), others=("1",))
    check({"then": False, "else": False}, taken=("1",))


# What is not followed.


@pytest.mark.parametrize(
    "keyword, schema",
    [
        ("uniqueItems", {"type": "array", "uniqueItems": True, "maxItems": 2}),
        ("contains", {"type": "array", "contains": {"type": "null"}}),
        ("unevaluatedItems", {"anyOf": [{"prefixItems": [True]}], "unevaluatedItems": False}),
        ("unevaluatedProperties", {"if": {"required": ["a"]}, "unevaluatedProperties": False}),
        ("propertyNames", {"patternProperties": {"^a": True}, "propertyNames": {"pattern": "b"}}),
        ("minProperties", {"type": "object", "minProperties": 2}),
        ("not", {"not": {"const": "a"}}),
        ("$recursiveRef", {"items": {"$recursiveRef": "#"}}),
        (
            "$dynamicRef",
            {
                "$defs": {"a": {"$dynamicAnchor": "n"}, "b": {"$id": "b", "$dynamicAnchor": "n"}},
                "$dynamicRef": "#n",
            },
        ),
    ],
)
def test_a_keyword_that_is_not_built_is_refused_with_the_reason(keyword: str, schema: Any) -> None:
    reason = NOT_BUILT.get(keyword, "more than one schema may be meant; write $ref")
    assert f"it has {keyword}: {reason}" in why_refused(schema)


def test_what_such_keywords_say_without_effect_is_taken() -> None:
    check({"type": "array", "uniqueItems": False}, taken=("[1,1]",))
    check({"type": "array", "uniqueItems": True, "maxItems": 1}, taken=("[1]",), others=("[1,2]",))
    check({"type": "array", "contains": {"type": "null"}, "minContains": 0}, taken=("[1]",))
    check({"type": "array", "contains": {}, "minContains": 2}, taken=("[1,2]",), others=("[1]",))
    check(
        {"type": "array", "prefixItems": [True], "unevaluatedItems": False}, taken=("[1]",), others=("[1,2]",)
    )
    check(
        {"type": "array", "items": [{"type": "null"}], "additionalItems": False},
        taken=("[null]",),
        others=("[1]",),
    )
    check({"minContains": 3, "maxContains": 1}, taken=("[1]",))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"required": "a"},
        {"patternProperties": 5},
        {"dependentRequired": ["a"]},
        {"items": 5},
        {"allOf": {}},
        {"anyOf": 5},
        {"enum": "a"},
        {"type": {}},
        {"type": "object", "properties": {"a": "string"}},
        {"minLength": "2"},
        {"format": 5, "type": "string"},
        {"const": "a\u0001"},
    ],
)
def test_anything_but_a_schema_is_refused(schema: Any) -> None:
    why_refused(schema)


# What it may cost.


def deep(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(n):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        deep(200),
        {"const": json.loads("[" * 150 + "]" * 150)},
        {"enum": [[i] for i in range(20_001)]},
        {
            "patternProperties": {f"^{i}x$": {} for i in range(30)},
            "properties": {f"name {i}": {} for i in range(1000)},
        },
    ],
)
def test_a_schema_that_costs_too_much_is_refused(schema: Any) -> None:
    with pytest.raises(CannotFollow, match=r"nested deeper than 100|too large, or has too many"):
        json_schema.followed(schema)


def test_a_long_chain_of_references_is_followed() -> None:
    chain = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(2000)}
    assert len(followed({"$defs": {**chain, "a2000": {}}, "$ref": "#/$defs/a0"})["$defs"]) == 2001


# Patterns.


@pytest.mark.parametrize(
    "pattern, taken, others",
    [
        (r"^\p{L}+$", ("é", "日本", "aZ"), ("1", "")),
        (r"^\p{Lu}\p{Ll}*$", ("Éa", "Z"), ("éa",)),
        (r"^\p{Script=Greek}+$", ("αβ",), ("ab",)),
        (r"^[\p{L}\p{N}_.-]{1,4}$", ("é1_.", "-"), ("a b", "abcde")),
        (r"^[^\p{L}]$", ("1", "-"), ("é",)),
        (r"^\u{1F600}|\ud83d\ude01$", ("\U0001f600", "\U0001f601"), ("\U0001f602",)),
        (r"^\x41\u0042\u{43}$", ("ABC",), ("abc",)),
        (r"^[[\]{}&&--~~a]+$", ("[]{}&-~a",), ("b",)),
        (r"^[+--]$", ("+", ",", "-"), (".",)),
        (r"^{}a{,2}{$", ("{}a{,2}{",), ("aa",)),
        (r"^\s\S$", ("\ufeffa", " b"), ("ab",)),
        (r"^[\s,]$", ("\u2028", ","), ("a",)),
        (r"^\d\D\w\W$", ("1ab ",), ("١ab ",)),
        (r"^[^]$", ("a", "\n"), ("",)),
        (r"^(a|[])$", ("a",), ("", "b")),
        (r"^a\/b\-c\<\>$", ("a/b-c<>",), ()),
        (r"^[\b]$", ("\b",), ("b",)),
        (r"^(\cAa|b|\x01c|[\x00-\x07]d)$", ("b",), ("a", "c", "d")),
        (r"^[^\x00-\x1f\x7f]+$", ("aé",), ("\n",)),
        (r"^a.*?b$", ("ab", "axxb"), ("abc",)),
    ],
)
def test_patterns_are_those_of_ecmascript(
    pattern: str, taken: tuple[str, ...], others: tuple[str, ...]
) -> None:
    check(
        {"type": "string", "pattern": pattern},
        taken=tuple(json.dumps(text, ensure_ascii=False) for text in taken),
        others=tuple(json.dumps(text, ensure_ascii=False) for text in others),
    )


@pytest.mark.parametrize("pattern", [r"(?=a)b", r"(a)\1", r"\bword", "[a", "(", "\\", r"\p{Klingon}"])
def test_a_pattern_in_no_known_syntax_is_refused(pattern: str) -> None:
    why_refused({"type": "string", "pattern": pattern})


def test_a_pattern_is_rewritten_in_linear_time_and_space() -> None:
    for piece in (r"\s", "[", "{", "[^", "a{1", "\\", r"\u", "[a-", "-", r"[\x00-", "]"):
        assert len(rust_pattern(piece * 2000)) <= 60 * 2000 * len(piece)


@pytest.mark.parametrize("pattern", ["^a|b$", "^(a|b)$", "", "[0-9]", "^a{2,3}$"])
def test_names_are_matched_as_python_does(pattern: str) -> None:
    matching = NamePattern(rust_pattern(pattern))
    for name in ("a", "b", "ab", "ba", "aa", "aaa", "aaaa", "x1", "", 'a"', "é", "a\n1"):
        assert matching.matches(name) == (re.search(pattern.replace("$", r"\Z"), name) is not None), name


def test_whether_other_names_are_left() -> None:
    assert not has_other_names(["a", "b"], inside=["^(a|b)$"])
    assert has_other_names(["a"], inside=["^(a|b)$"]) and has_other_names(["a"], inside=["^a"])
    assert not has_other_names([], outside=[""]) and has_other_names([], outside=["^a"])
    assert not has_other_names(["a"], outside=["^[^a]", "^$", "^a[\\s\\S]"])
    assert has_other_names([], inside=["("]), "what cannot be decided"


def test_alternatives_that_take_too_long_to_compare_are_left_to_llguidance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schema_looks, "MAX_LOOKS", 10)
    options = [{"type": name} for name in ("null", "string", "integer", "object")]
    assert followed({"oneOf": options}) == {"oneOf": options}


def test_a_reference_that_is_no_uri_is_refused() -> None:
    assert "'http://[' is not a URI" in why_refused({"$id": "http://example.com/a", "$ref": "http://["})


def test_a_definition_is_looked_at_a_few_times_however_many_it_refers_to() -> None:
    """The limit of work covers all looks together."""
    many = {f"b{i}": {"type": "array", "items": {"$ref": f"#/$defs/b{i - 1}"}} for i in range(1, 2000)}
    every = {"allOf": [{"$ref": f"#/$defs/{name}"} for name in many]}
    schema = {"$ref": "#/$defs/a", "$defs": {"a": every, "b0": {"type": "null"}, **many}}
    assert followed(schema)["$ref"] == "#/$defs/r0"
