"""Random JSON schemas, small enough that any model completes an output within its limit."""

import random
from typing import Any

_WORDS = ("name", "age", "id", "ok", "tags", "x", "y", "größe", "a b", 'na"me', "日本")
_VALUES: tuple[Any, ...] = (None, True, False, 0, -3, 17, "red", "green", "", "ü", [], [1, "a"], {"k": 1})


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A random schema: all types, bounds, enumerations, alternatives, references, optional properties."""
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "const", "pattern"]
    if depth:
        kinds += ["object", "object", "array", "tuple", "anyOf", "ref"]
    kind = rng.choice(kinds)
    match kind:
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}
        case "number":
            low = rng.randint(-5, 5)
            return {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.randint(1, 9)}
        case "string":
            least = rng.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 5)}
        case "boolean" | "null":
            return {"type": kind}
        case "enum":
            return {"enum": rng.sample(_VALUES, rng.randint(1, 4))}
        case "const":
            return {"const": rng.choice(_VALUES)}
        case "pattern":
            return {
                "type": "string",
                "pattern": rng.choice(["^[a-f]{2,4}$", "^(yes|no)$", "^\\d{3}-\\d{2}$"]),
            }
        case "object":
            names = rng.sample(_WORDS, rng.randint(0, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth - 1) for name in names},
                "required": [name for name in names if rng.random() < 0.6],
                "additionalProperties": False,
            }
        case "array":
            least = rng.randint(0, 2)
            most = least + rng.randint(0, 2)
            return {
                "type": "array",
                "items": random_schema(rng, depth - 1),
                "minItems": least,
                "maxItems": most,
            }
        case "tuple":
            items = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
        case _:
            other = random_schema(rng, depth - 1)
            return {
                "type": "object",
                "properties": {"one": {"$ref": "#/$defs/other"}, "two": {"$ref": "#/$defs/other"}},
                "required": ["one"],
                "additionalProperties": False,
                "$defs": {"other": other},
            }


def top_schema(rng: random.Random) -> dict[str, Any]:
    """A random schema whose references point to the `$defs` of the whole document."""
    while True:
        schema = random_schema(rng)
        if not _nested_definitions(schema, top=True):
            return schema


def _nested_definitions(schema: Any, *, top: bool) -> bool:
    if isinstance(schema, list):
        return any(_nested_definitions(item, top=False) for item in schema)
    if not isinstance(schema, dict):
        return False
    return ("$defs" in schema and not top) or any(
        _nested_definitions(value, top=False) for value in schema.values()
    )
