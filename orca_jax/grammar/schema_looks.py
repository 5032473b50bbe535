"""Derives bounds on a JSON schema's values from its keywords: types, constants, properties."""

# Schemas come from clients: any JSON may stand anywhere.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import inf
from typing import Any

from orca_jax.grammar.schema_document import CannotFollow, SchemaDocument
from orca_jax.grammar.schema_values import (
    ASSERTIONS,
    TYPES,
    canonical,
    is_number,
    not_built,
    type_of,
    types_of,
    values_of,
)

MAX_LOOKS = 50_000  # at the schemas of one document; some 0.1 s
_MAX_STEPS = 8  # references and properties followed
_MAX_PAIRS = 24  # alternatives of a oneOf of which every pair is compared


class TooManyLooks(CannotFollow):
    """Raised when a look does not show what a schema allows."""


@dataclass
class Evaluated:
    """The properties to which some keywords apply: by name, by pattern, or all."""

    names: dict[str, None] = field(default_factory=dict[str, None])
    patterns: dict[str, None] = field(default_factory=dict[str, None])
    has_all: bool = False


class SchemaLooks:
    """Looks at the schemas of one document. Every method may raise TooManyLooks."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self._left = MAX_LOOKS

    def _look(self, cost: int = 1) -> None:
        self._left -= cost
        if self._left < 0:
            raise TooManyLooks("it has too many alternatives")

    def dereferenced(self, schema: Any) -> Any:
        """The schema, or the schema that it refers to if it is only a reference."""
        for _ in range(_MAX_STEPS):
            if not isinstance(schema, dict):
                break
            if not self._document.is_alias(schema) and ASSERTIONS & schema.keys() != {"$ref"}:
                break
            self._look()
            schema = self._document.target(schema, "$ref")
        return schema

    def _parts(self, schema: dict[str, Any]) -> list[Any]:
        """Further schemas by which every instance of `schema` is valid."""
        if self._document.is_alias(schema):
            return [self._document.target(schema, "$ref")]
        parts = list(schema["allOf"]) if isinstance(schema.get("allOf"), list) else []
        return parts + [
            self._document.target(schema, key) for key in ("$ref", "$dynamicRef") if key in schema
        ]

    def _own(self, schema: dict[str, Any], key: str) -> Any:
        """The value of a keyword; None if a reference replaces it."""
        return None if self._document.is_alias(schema) else schema.get(key)

    def _values(self, schema: dict[str, Any]) -> list[Any] | None:
        values = None if self._document.is_alias(schema) else values_of(schema)
        self._look(len(values or ()))
        return values

    def types(self, schema: Any, steps: int = _MAX_STEPS) -> frozenset[str]:
        """A superset of the types of the instances; a number is an `integer` or a `fraction`."""
        self._look()
        if schema is False:
            return frozenset()
        types = types_of(TYPES)
        if not isinstance(schema, dict) or steps == 0:
            return types
        if self._own(schema, "type") is not None:
            types &= types_of(schema["type"])
        values = self._values(schema)
        if values is not None:
            types &= frozenset(map(type_of, values))
        for part in self._parts(schema):
            types &= self.types(part, steps - 1)
        for key in ("anyOf", "oneOf"):
            options = self._own(schema, key)
            if isinstance(options, list):
                types &= frozenset[str]().union(*(self.types(each, steps - 1) for each in options))
        return types

    def values(self, schema: Any, steps: int = _MAX_STEPS) -> frozenset[str] | None:
        """A superset of the instances, as canonical texts; None if they are not listed."""
        self._look()
        if not isinstance(schema, dict) or steps == 0:
            return None
        values = self._values(schema)
        if values is not None:
            return frozenset(map(canonical, values))
        found = (self.values(part, steps - 1) for part in self._parts(schema))
        return next((each for each in found if each is not None), None)

    def required(self, schema: Any, steps: int = _MAX_STEPS) -> frozenset[str]:
        """Properties that the schema's objects must have."""
        self._look()
        if not isinstance(schema, dict) or steps == 0:
            return frozenset()
        own = self._own(schema, "required")
        names = [each for each in own if isinstance(each, str)] if isinstance(own, list) else []
        return frozenset(names).union(*(self.required(part, steps - 1) for part in self._parts(schema)))

    def property_of(self, schema: Any, name: str, steps: int = _MAX_STEPS) -> list[Any]:
        """The schemas by which this property of the objects must be valid."""
        self._look()
        if not isinstance(schema, dict) or steps == 0:
            return []
        own = self._own(schema, "properties")
        found = [own[name]] if isinstance(own, dict) and name in own else []
        for part in self._parts(schema):
            found += self.property_of(part, name, steps - 1)
        return found

    def listed(self, schema: Any, steps: int = _MAX_STEPS) -> dict[str, None]:
        """The names of the properties that the schema lists, in order."""
        self._look()
        names = dict[str, None]()
        if isinstance(schema, dict) and steps:
            own = self._own(schema, "properties")
            names |= dict.fromkeys(own if isinstance(own, dict) else ())
            for part in self._parts(schema):
                names |= self.listed(part, steps - 1)
        return names

    def exclude(self, one: Any, other: Any, steps: int = _MAX_STEPS) -> bool:
        """Whether no value is valid by both; False also if that cannot be decided."""
        types = self.types(one) & self.types(other)
        values, others = self.values(one), self.values(other)
        if not types or (values is not None and others is not None and not values & others):
            return True
        if types <= {"integer", "fraction"}:
            left, right = self.dereferenced(one), self.dereferenced(other)
            return _is_below(left, right) or _is_below(right, left)
        return types == {"object"} and any(
            self.exclude(left, right, steps - 1)
            for name in (sorted(self.required(one) | self.required(other)) if steps else ())
            for left in self.property_of(one, name)
            for right in self.property_of(other, name)
        )

    def are_disjoint(self, schemas: Sequence[Any], tag: str | None) -> bool:
        """Whether no value is valid by two of these schemas; `tag` is the result of `tag_of`."""
        if tag is not None and all(tag in self.required(each) for each in schemas):
            return True
        values = [each for each in map(self.values, schemas) if each is not None]
        if len(values) == len(schemas):
            return _share_nothing(values)
        pairs = combinations(schemas, 2)
        return len(schemas) <= _MAX_PAIRS and all(self.exclude(one, other) for one, other in pairs)

    def tag_of(self, schemas: Sequence[Any]) -> str | None:
        """A property with a different constant in each of these schemas; None unless all are of objects."""
        if not schemas or any(self.types(each) != {"object"} for each in schemas):
            return None
        for name in self.listed(schemas[0]):
            tags = list[frozenset[str]]()
            for each in schemas:
                found = [v for one in self.property_of(each, name) if (v := self.values(one)) is not None]
                if not found:
                    break
                tags.append(found[0])
            if len(tags) == len(schemas) and _share_nothing(tags):
                return name
        return None

    def evaluated(self, schema: Any, steps: int = _MAX_STEPS) -> Evaluated:
        """The properties to which the keywords apply. Raises CannotFollow if that depends on the output."""
        self._look()
        found = Evaluated()
        if not isinstance(schema, dict):
            return found
        depends = {"anyOf", "oneOf", "if", "dependentSchemas", "dependencies"}
        if steps == 0 or (not self._document.is_alias(schema) and depends & schema.keys()):
            raise not_built("unevaluatedProperties")
        for key, names in (("properties", found.names), ("patternProperties", found.patterns)):
            own = self._own(schema, key)
            names |= dict.fromkeys(own if isinstance(own, dict) else ())
        found.has_all = self._own(schema, "additionalProperties") is not None
        for part in self._parts(schema):
            other = self.evaluated(part, steps - 1)
            found.names |= other.names
            found.patterns |= other.patterns
            is_whole = isinstance(part, dict) and self._own(part, "unevaluatedProperties") is not None
            found.has_all = found.has_all or other.has_all or is_whole
        return found


def _share_nothing(sets: Sequence[frozenset[str]]) -> bool:
    return sum(map(len, sets)) == len(frozenset[str]().union(*sets))


def _is_below(low: Any, high: Any) -> bool:
    """Whether all numbers within the bounds of `low` are less than all within those of `high`."""
    most, most_open = _bound(low, "maximum", "exclusiveMaximum", min)
    least, least_open = _bound(high, "minimum", "exclusiveMinimum", max)
    return most < least or (most == least and (most_open or least_open))


def _bound(schema: Any, closed: str, opened: str, tighter: Callable[[Any, Any], Any]) -> tuple[Any, bool]:
    """The tighter of two bounds, and whether it is excluded."""
    none = -tighter(-inf, inf)
    if not isinstance(schema, dict):
        return none, False
    one, other = (schema[key] if is_number(schema.get(key)) else none for key in (closed, opened))
    return tighter(one, other), other == tighter(one, other)
