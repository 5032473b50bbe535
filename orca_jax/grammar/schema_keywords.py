"""The keywords of JSON Schema: those that say which values are valid, and why some are refused."""

from typing import Any

from orca_jax.grammar.schema_document import CannotFollow

TYPES = ("null", "boolean", "number", "string", "array", "object")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
LENGTHS = ("minLength", "maxLength")
ARRAYS = (
    *("prefixItems", "items", "additionalItems", "minItems", "maxItems", "uniqueItems"),
    *("contains", "minContains", "maxContains", "unevaluatedItems"),
)
MAPS = ("properties", "patternProperties", "dependentRequired", "dependentSchemas", "dependencies")
OBJECTS = (
    *MAPS,
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("required", "minProperties", "maxProperties"),
)
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
COMBINED = ("allOf", "anyOf", "oneOf", "not", "if")
# Every other keyword is an annotation, or holds schemas for references to name.
ASSERTIONS = frozenset(
    (
        *("type", "const", "enum", "pattern", "format"),
        *(*BOUNDS, *LENGTHS, *ARRAYS, *OBJECTS, *REFERENCES, *COMBINED),
    )
)

# Why a keyword is refused, where it is.
NOT_BUILT = {
    "uniqueItems": "a grammar does not remember the items before; maxItems 1 is possible",
    "contains": "a grammar does not remember the items before",
    "minProperties": "names that are not listed may come twice, so one more than is required is the most",
    "unevaluatedItems": "beside anyOf, oneOf, allOf, if, contains or $ref it is not supported",
    "unevaluatedProperties": "beside anyOf, oneOf, if or dependencies it is not supported",
    "propertyNames": "only enum, const, pattern and lengths are supported, without patternProperties",
    "not": "only types, constants, bounds and properties can be turned into their opposite",
}


def not_built(keyword: str) -> CannotFollow:
    """The error for a keyword of NOT_BUILT."""
    return CannotFollow(f"it has {keyword}: {NOT_BUILT[keyword]}")


def is_trivial(schema: Any) -> bool:
    """Whether every value is valid by it, as there is nothing in it that says otherwise."""
    return not ASSERTIONS & schema.keys() if isinstance(schema, dict) else schema is True
