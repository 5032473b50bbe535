"""Random JSON schemas with every supported keyword, in combinations that nobody would write.

Most of them have valid values, many have few, some have none.
"""

import random
from typing import Any

NAMES = ("a", "b", "ab", "c1", "x")
_NAME_PATTERNS = ("^a$", "^a", "b$", "^[a-c]$", "", "^x_", "[0-9]", "^(a|b)$", ".*", "^[^a]", "^$")
_PATTERNS = ("^a+$", "^[ab]{1,3}$", "[0-9]", "^\\d{3}$", "b$", "^\\p{L}{1,4}$", "^\\S[^\\x00-\\x1f]?$")
_FORMATS = (
    "date",
    "uuid",
    "date-time",
    "ipv4",
    "email",
    "password",
    "int64",
    "uri",
    "time",
    "duration",
    "byte",
)
_COMBINED = ("allOf", "anyOf", "oneOf")
_NUMBERS = (0, 1, 2, 3, 5, 10, -2, 0.5, 1.5, 2.0, -10, 100, 7)
_SCALARS = ("null", "boolean", "integer", "number", "string", "integer", "string")
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def any_schema(rng: random.Random) -> dict[str, Any]:
    """A schema, in one of four cases with definitions that refer to themselves and to each other."""
    if rng.random() >= 0.25:
        return _schema(rng, 0, ())
    names = ("n", "m")
    return {**_schema(rng, 0, names), "$defs": {name: _subschema(rng, 1, names) for name in names}}


def is_well_founded(schema: dict[str, Any]) -> bool:
    """Whether no definition refers to itself for the same value, which JSON Schema leaves undefined."""
    definitions = schema.get("$defs", {})

    def in_place(part: Any) -> set[str]:
        if not isinstance(part, dict):
            return set()
        found = {part["$ref"].removeprefix("#/$defs/")} if "$ref" in part else set[str]()
        parts = [part[key] for key in ("not", "if", "then", "else") if key in part]
        return found.union(*map(in_place, parts + [each for key in _COMBINED for each in part.get(key, ())]))

    uses = {name: in_place(definition) for name, definition in definitions.items()}
    for _ in uses:
        uses = {name: found.union(*(uses[each] for each in found)) for name, found in uses.items()}
    return all(name not in found for name, found in uses.items())


def any_value(rng: random.Random, depth: int = 0) -> Any:
    """A value of the kind that these schemas are about."""
    kind = rng.randrange(9 if depth < 2 else 6)
    if kind < 6:
        of_kind: tuple[tuple[Any, ...], ...] = (
            (None,),
            (True, False),
            (0, 1, 2, -3, 10, 1.0, 2.5),
            ("a", "b", "aa", "é", "", "12"),
            (0.5, -1.25, 100, 1e3),
            ("ab", "abc"),
        )
        return rng.choice(of_kind[kind])
    if kind == 6:
        return [any_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {name: any_value(rng, depth + 1) for name in rng.sample(NAMES, rng.randrange(4))}


def _subschema(rng: random.Random, depth: int, definitions: tuple[str, ...]) -> Any:
    return rng.random() < 0.7 if rng.random() < 0.06 else _schema(rng, depth, definitions)


def _schema(rng: random.Random, depth: int, definitions: tuple[str, ...]) -> dict[str, Any]:
    if depth >= 3 or rng.random() < 0.35:
        return _scalar(rng, definitions)

    def some(least: int, most: int) -> list[Any]:
        return [_subschema(rng, depth + 1, definitions) for _ in range(rng.randint(least, most))]

    kinds = ("object", "array", "anyOf", "oneOf", "allOf", "mixed", "if")
    (kind,) = rng.choices(kinds, (6, 3, 2, 1, 2, 2, 0.3))
    schema = dict[str, Any]()
    if kind in ("object", "mixed"):
        schema |= _object(rng, depth, definitions)
    if kind == "array":
        schema |= _array(rng, depth, definitions)
    if kind in ("anyOf", "oneOf", "allOf"):
        schema[kind] = some(1, 3)
        if rng.random() < 0.3:
            schema["type"] = rng.choice(("object", "string", "integer"))
    if kind == "mixed":
        schema[rng.choice(("anyOf", "oneOf", "allOf"))] = some(1, 2)
    if kind == "if":
        schema |= dict(zip(("if", "then", "else"), some(2, 3), strict=False))
    if rng.random() < 0.03:
        schema["not"] = rng.choice(({}, {"type": "string"}, {"const": 1}, {"required": ["a"]}))
    if rng.random() < 0.3:
        items = list(schema.items())
        rng.shuffle(items)
        schema = dict(items)
    return schema


def _scalar(rng: random.Random, definitions: tuple[str, ...]) -> dict[str, Any]:
    kind = rng.choice(_SCALARS)
    if rng.random() < 0.1:
        return {"const": any_value(rng)}
    if rng.random() < 0.12:
        return {"enum": [any_value(rng) for _ in range(rng.randint(1, 3))]}
    if definitions and rng.random() < 0.2:
        return {"$ref": f"#/$defs/{rng.choice(definitions)}"}
    schema: dict[str, Any] = {"type": kind} if rng.random() < 0.9 else {}
    if rng.random() < 0.1:
        schema["type"] = rng.sample(_TYPES, rng.randint(1, 3))
    if kind in ("integer", "number") or rng.random() < 0.1:
        for key, share in (
            ("minimum", 0.4),
            ("maximum", 0.4),
            ("exclusiveMinimum", 0.15),
            ("exclusiveMaximum", 0.15),
        ):
            if rng.random() < share:
                schema[key] = rng.choice(_NUMBERS)
        if rng.random() < 0.25:
            schema["multipleOf"] = rng.choice((1, 2, 3, 5, 0.5, 0.25, 1.0, 7, 0.1))
    if kind == "string" or rng.random() < 0.1:
        for key, share, values in (
            ("minLength", 0.3, (0, 1, 2, 3, 2.0)),
            ("maxLength", 0.4, (0, 1, 2, 5, 3.0)),
            ("pattern", 0.25, _PATTERNS),
            ("format", 0.25, _FORMATS),
        ):
            if rng.random() < share:
                schema[key] = rng.choice(values)
    return schema


def _object(rng: random.Random, depth: int, definitions: tuple[str, ...]) -> dict[str, Any]:
    def under(names: list[str]) -> dict[str, Any]:
        return {name: _subschema(rng, depth + 1, definitions) for name in names}

    schema: dict[str, Any] = {"type": "object"} if rng.random() < 0.85 else {}
    if rng.random() < 0.9:
        schema["properties"] = under(rng.sample(NAMES, rng.randint(1, 3)))
    if rng.random() < 0.5:
        schema["required"] = rng.sample(NAMES, rng.randint(1, 2))
    if rng.random() < 0.35:
        schema["patternProperties"] = under(rng.sample(_NAME_PATTERNS, rng.randint(1, 2)))
    if rng.random() < 0.6:
        schema["additionalProperties"] = rng.random() >= 0.7 and _subschema(rng, depth + 1, definitions)
    for key, share, values in (
        ("minProperties", 0.1, (0, 1, 2, 1.0)),
        ("maxProperties", 0.1, (0, 1, 2, 3)),
        (
            "propertyNames",
            0.1,
            ({"type": "string"}, True, {"pattern": "^a"}, {"enum": ["a", "b"]}, {"maxLength": 2}),
        ),
        ("dependentRequired", 0.06, ({"a": ["b"]}, {"x": ["a", "c1"]})),
        ("unevaluatedProperties", 0.05, (False, {"type": "integer"})),
    ):
        if rng.random() < share:
            schema[key] = rng.choice(values)
    return schema


def _array(rng: random.Random, depth: int, definitions: tuple[str, ...]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"} if rng.random() < 0.9 else {}
    if rng.random() < 0.8:
        schema["items"] = _subschema(rng, depth + 1, definitions)
    if rng.random() < 0.3:
        schema["prefixItems"] = [_subschema(rng, depth + 1, definitions) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.3:
        schema["minItems"] = rng.choice((0, 1, 2))
    schema["maxItems"] = rng.choice((0, 1, 2, 3))
    if rng.random() < 0.05:
        schema["uniqueItems"] = rng.random() < 0.5
    if rng.random() < 0.05:
        schema["contains"] = _subschema(rng, depth + 1, definitions)
    return schema
