"""Resolves references within one JSON schema: which subschema a `$ref` names. Fetches nothing."""

# Schemas come from clients: any JSON may stand anywhere.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urljoin

MAX_DEPTH = 100  # schemas inside schemas; llguidance's own limit is 128 levels of JSON

# Keywords by their value: one schema, a list of schemas, or schemas by name.
_ONE = (
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not"),
    *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
)
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")

_OLD_DRAFT = re.compile(r"json-schema\.org/draft-0[3467]/")


class CannotFollow(Exception):
    """A schema that cannot be made into a grammar; the message says which part, and why."""


@dataclass(frozen=True, slots=True)
class _Place:
    """`base` is the URI that references are relative to; `is_old` says draft 7 or earlier."""

    base: str
    is_old: bool


class SchemaDocument:
    """The subschemas of one document by URI, anchor and JSON pointer."""

    def __init__(self, root: Any) -> None:
        """Takes time linear in the document. Raises CannotFollow if it is nested too deep."""
        self._places = dict[int, _Place]()  # by id() of a subschema; `root` keeps them all alive
        self._resources = dict[str, Any]()
        self._anchors = dict[tuple[str, str], Any]()
        self._dynamic_anchors = Counter[str]()
        self._index(root, _Place("", False))
        self._resources.setdefault("", root)

    def is_alias(self, schema: dict[str, Any]) -> bool:
        """Whether a `$ref` replaces the schema's other keywords, as before draft 2019-09."""
        return "$ref" in schema and self._places[id(schema)].is_old

    def target(self, schema: dict[str, Any], key: str) -> Any:
        """The schema that a reference of `schema` names. Raises CannotFollow."""
        reference = schema[key]
        if not isinstance(reference, str):
            raise CannotFollow(f"{key} is not a text")
        fragment = reference.partition("#")[2]
        if key == "$recursiveRef" or (key == "$dynamicRef" and self._dynamic_anchors[fragment] > 1):
            raise CannotFollow(f"it has {key}: more than one schema may be meant; write $ref")
        url, _, fragment = _joined(self._places[id(schema)].base, reference).partition("#")
        if url not in self._resources:
            raise CannotFollow(f"{key} {reference!r} is outside of the schema; copy what it names into $defs")
        resource, fragment = self._resources[url], unquote(fragment)
        if fragment.startswith("/"):
            return self._at_pointer(resource, fragment, reference)
        if not fragment:
            return resource
        if (url, fragment) not in self._anchors:
            raise _nothing(reference)
        return self._anchors[url, fragment]

    def _at_pointer(self, resource: Any, pointer: str, reference: str) -> Any:
        found, place = resource, self._places.get(id(resource), _Place("", False))
        for part in pointer[1:].split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isdecimal() and part.isascii() and len(part) < 9:
                if int(part) >= len(found):
                    raise _nothing(reference)
                found = found[int(part)]
            else:
                raise _nothing(reference)
            place = self._places.get(id(found), place)
        if isinstance(found, dict) and id(found) not in self._places:
            self._index(found, place)  # a schema in a place that is not a keyword's
        return found

    def _index(self, root: Any, place: _Place) -> None:
        todo: list[tuple[Any, _Place, int]] = [(root, place, 0)]
        while todo:
            schema, place, depth = todo.pop()
            if not isinstance(schema, dict) or id(schema) in self._places:
                continue
            if depth > MAX_DEPTH:
                raise CannotFollow(f"it is nested deeper than {MAX_DEPTH} schemas")
            place = self._placed(schema, place)
            self._places[id(schema)] = place
            todo.extend((each, place, depth + 1) for each in _subschemas(schema))

    def _placed(self, schema: dict[str, Any], place: _Place) -> _Place:
        """Record the names of `schema`; return the place of the schemas inside it."""
        dialect, base = schema.get("$schema"), place.base
        is_old = bool(_OLD_DRAFT.search(dialect)) if isinstance(dialect, str) else place.is_old
        identifier = schema.get("$id", schema.get("id") if is_old else None)
        if isinstance(identifier, str) and not (is_old and "$ref" in schema):
            if is_old and identifier.startswith("#"):
                self._anchors[base, identifier[1:]] = schema
            else:
                base = _joined(base, identifier).partition("#")[0]
                self._resources[base] = schema
        for key in ("$anchor", "$dynamicAnchor"):
            name = schema.get(key)
            if isinstance(name, str):
                self._anchors[base, name] = schema
                self._dynamic_anchors[name] += key == "$dynamicAnchor"
        return _Place(base, is_old)


def _subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    for key in _ONE:
        if key in schema:
            yield schema[key]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from schema[key]
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            yield from schema[key].values()


def _joined(base: str, reference: str) -> str:
    if reference.startswith("#"):  # urljoin knows no fragments of a URN
        return base + reference
    try:
        return urljoin(base, reference)
    except ValueError as error:
        raise CannotFollow(f"{reference!r} is not a URI: {error}") from error


def _nothing(reference: str) -> CannotFollow:
    return CannotFollow(f"the reference {reference!r} names nothing in the schema")
