"""Rewrites clients' JSON schemas into schemas that llguidance follows exactly.

llguidance implements a part of JSON Schema, refuses the rest, and reads some of it differently from the
standard. `followed` turns a schema of any draft from 4 to 2020-12 into one with the same instances within
that part. If there is none, CannotFollow names the keyword and the reason (NOT_BUILT).
"""

# Schemas come from clients: any JSON may stand anywhere.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from math import factorial, inf
from typing import Any

from orca_jax.grammar.schema_document import MAX_DEPTH, CannotFollow, SchemaDocument
from orca_jax.grammar.schema_ends import DEFINITIONS, ended
from orca_jax.grammar.schema_looks import SchemaLooks, TooManyLooks
from orca_jax.grammar.schema_patterns import (
    FORMATS,
    LIBRARY_FORMATS,
    MAX_HOSTNAME,
    NamePattern,
    has_other_names,
    is_writable,
    rust_pattern,
)
from orca_jax.grammar.schema_values import (
    ARRAYS,
    ASSERTIONS,
    BOUNDS,
    LENGTHS,
    MAPS,
    NOT_BUILT,
    OBJECTS,
    OPPOSITES,
    REFERENCES,
    any_of,
    both,
    canonical,
    is_number,
    is_plain,
    is_trivial,
    json_number,
    not_built,
    not_constant,
    object_of,
    other_types,
    type_of,
    values_of,
)

MAX_WORK = 20_000  # schemas and constants rewritten, and names matched; some 0.1 s
MAX_ORDERS = 24  # orders of the keys of one constant object; one with more keys has the given order
MAX_ALL_ORDERS = 240  # of all constant objects of a schema
_SIMPLE = frozenset(("type", "const", "enum"))

# Patterns that match every property name.
_EVERY_NAME = frozenset(("", "^", "$", ".*", "^.*", ".*$", r"[\s\S]*", r"^[\s\S]*", r"^[\s\S]*$"))


def followed(schema: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a schema for llguidance, with the same values. Raises CannotFollow.

    A value has fewer spellings than JSON Schema allows: integers have no fraction, properties come in the
    schema's order.
    """
    return _Rewriting(schema).whole()


class _Rewriting:
    """Rewrites one document: its root, and the subschemas that its references name."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self.document = SchemaDocument(root)
        self.looks = SchemaLooks(self.document)
        self._names = dict[int, str]()  # by id() of a subschema: its name in the new $defs
        self._todo = list[Any]()  # subschemas that have a name and are not rewritten yet
        self._made = dict[str, Any]()  # the new $defs
        self._work, self._orders, self._depth = MAX_WORK, MAX_ALL_ORDERS, 0
        self._known: tuple[str, ...] | None = None
        self._matching = dict[str, list[str]]()

    def whole(self) -> dict[str, Any]:
        """The rewritten root, with everything that it refers to in its `$defs`."""
        schema = self.schema(self._root)
        while self._todo:
            target = self._todo.pop()
            self._made[self._names[id(target)]] = self.schema(target)
        schema, made = ended(schema, self._made, self.spend)
        rewritten: dict[str, Any] = {} if schema is True else schema
        return {**rewritten, "$defs": made} if made else rewritten

    @contextmanager
    def within(self) -> Iterator[None]:
        """Count a visit to a schema or a constant."""
        self.spend()
        if self._depth >= MAX_DEPTH:
            raise CannotFollow(f"it is nested deeper than {MAX_DEPTH} schemas or values")
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def spend(self) -> None:
        """Count some work. Raises CannotFollow if there was too much."""
        self._work -= 1
        if self._work < 0:
            raise CannotFollow("it is too large, or has too many alternatives")

    def schema(self, schema: Any) -> Any:
        """Rewrite a schema; anything that is not a schema stays, for llguidance to refuse."""
        if not isinstance(schema, dict):
            return schema
        with self.within():
            is_alias = self.document.is_alias(schema)
            return self.reference(schema, "$ref") if is_alias else _Keywords(self, schema).all()

    def schemas(self, schemas: Any) -> Any:
        return [self.schema(each) for each in schemas] if isinstance(schemas, list) else schemas

    def constant(self, value: Any) -> Any:
        """The schema of the values equal to `value`; few enough keys of objects may have any order."""
        with self.within():
            if isinstance(value, list):
                items = [self.constant(each) for each in value]
                if any(item is False for item in items):
                    return False
                if all(map(is_plain, items)):
                    return {"const": [item["const"] for item in items]}
                n = len(items)
                return {"type": "array", "prefixItems": items, "items": False, "minItems": n, "maxItems": n}
            if not isinstance(value, dict):
                is_written = not isinstance(value, str) or is_writable(value)
                return {"const": json_number("const", value)} if is_written else False
            properties = {key: self._shared(self.constant(each)) for key, each in value.items()}
            n_orders = factorial(len(value)) if len(value) < 8 else inf
            if n_orders > min(MAX_ORDERS, self._orders):
                return object_of(properties, tuple(value))
            self._orders -= int(n_orders)
            return any_of([object_of(properties, keys) for keys in permutations(value)])

    def _shared(self, constant: Any) -> Any:
        """Replace a constant with several orders by a reference, because other orders will repeat it."""
        if constant is False or "anyOf" not in constant:
            return constant
        name = f"c{len(self._made)}"
        self._made[name] = constant
        return {"$ref": f"{DEFINITIONS}{name}"}

    def reference(self, schema: dict[str, Any], key: str) -> Any:
        """A reference to the rewritten schema that the keyword `key` of `schema` names."""
        target = self.document.target(schema, key)
        if not isinstance(target, dict):
            return self.schema(target)
        name = self._names.get(id(target))
        if name is None:
            name = self._names[id(target)] = f"r{len(self._names)}"
            self._todo.append(target)
        return {"$ref": f"{DEFINITIONS}{name}"}

    # Names of properties.

    def matching(self, pattern: str) -> list[str]:
        """The names in the document that match a pattern in Rust's syntax."""
        if self._known is None:
            self._known = tuple(dict.fromkeys(_names_in(self._root)))
        if pattern not in self._matching:
            matching = NamePattern(pattern)
            found = self._matching[pattern] = []
            for name in self._known:
                self.spend()
                if matching.matches(name):
                    found.append(name)
        return self._matching[pattern]

    def not_matching(self, patterns: Sequence[str]) -> list[str]:
        """The names in the document that match none of these patterns."""
        matching = set[str]().union(*map(self.matching, patterns))
        return [name for name in self._known or () if name not in matching]


@dataclass
class _Shape:
    """The schemas of an object's properties: by name, by pattern in Rust's syntax, and for all others."""

    names: dict[str, Any]
    patterns: dict[str, Any]
    more: Any


class _Keywords:
    """Rewrites the keywords of one schema."""

    def __init__(self, rewriting: _Rewriting, schema: dict[str, Any]) -> None:
        self._to = rewriting
        self._schema = schema
        self._out = dict[str, Any]()
        self._also = list[Any]()  # further schemas by which an instance must be valid

    def all(self) -> Any:
        """Rewrite the keywords in order: an object's properties come in the order of the schema."""
        schema, to = self._schema, self._to
        array = next((key for key in schema if key in ARRAYS), None)
        objects = "properties" if "properties" in schema else next((k for k in schema if k in OBJECTS), None)
        for key, value in schema.items():
            if key == array:
                self._array()
            elif key == objects:
                self._object()
            elif key in BOUNDS or key in LENGTHS:
                self._bound(key, value)
            elif key == "type":
                self._out[key] = value
            elif key == "pattern":
                self._out[key] = rust_pattern(value) if isinstance(value, str) else value
            elif key == "format":
                self._format(value)
            elif key == "const":
                self._put(to.constant(value), key)
            elif key == "enum":
                self._enum(value)
            elif key in REFERENCES:
                self._put(to.reference(schema, key), key)
            elif key in ("allOf", "anyOf"):
                self._put({key: to.schemas(value)}, key)
            elif key == "oneOf":
                self._one_of(value)
            elif key == "not":
                self._put(self._negation(value, schema.get("properties")), key)
            elif key == "if":
                self._condition()
        if any(each is False for each in self._also):
            return False
        if self._also:
            before = self._out.get("allOf", [])
            self._out["allOf"] = [*(before if isinstance(before, list) else [before]), *self._also]
        return self._out

    def _put(self, schema: Any, key: str) -> None:
        """Add the schema that the keyword `key` became: in the keyword's place, or in `allOf`."""
        if schema is True:
            return
        taken = self._out.keys() | (self._schema.keys() - {key})
        if isinstance(schema, dict) and not schema.keys() & taken:
            self._out |= schema
        else:
            self._also.append(schema)

    # Numbers and texts.

    def _bound(self, key: str, value: Any) -> None:
        if key.startswith("exclusive") and isinstance(value, bool):  # draft 4
            bound = self._schema.get(key.replace("exclusiveM", "m"))
            if value and bound is not None:
                self._out[key] = json_number(key, bound)
        else:
            self._out[key] = json_number(key, value)

    def _format(self, name: Any) -> None:
        if not isinstance(name, str) or name in LIBRARY_FORMATS:
            self._out["format"] = name
        elif name in FORMATS:
            self._put({"pattern": FORMATS[name]}, "format")
            if name == "hostname":
                self._put({"maxLength": MAX_HOSTNAME}, "format")

    def _enum(self, values: Any) -> None:
        if not isinstance(values, list):
            self._out["enum"] = values
            return
        constants = [schema for value in values if (schema := self._to.constant(value)) is not False]
        if constants and all(map(is_plain, constants)):
            self._out["enum"] = [each["const"] for each in constants]
        else:
            self._put(any_of(constants), "enum")

    # Arrays.

    def _array(self) -> None:
        schema, out = self._schema, self._out
        first, rest = schema.get("prefixItems"), schema.get("items")
        if isinstance(rest, list):  # before draft 2020-12
            first, rest = rest, schema.get("additionalItems")
        least, most = (json_number(key, schema.get(key)) for key in ("minItems", "maxItems"))
        if schema.get("uniqueItems") is True and not (is_number(most) and most <= 1):
            raise not_built("uniqueItems")
        unevaluated = schema.get("unevaluatedItems", True)
        if not is_trivial(unevaluated):
            if schema.keys() & {"allOf", "anyOf", "oneOf", "if", "contains", *REFERENCES}:
                raise not_built("unevaluatedItems")
            rest = unevaluated if rest is None else rest
        if "contains" in schema:
            least, most = self._contained(least, most)
        if first is not None:
            out["prefixItems"] = self._to.schemas(first)
        if rest is not None:
            out["items"] = self._to.schema(rest)
        for key, value in (("minItems", least), ("maxItems", most)):
            if value is not None:
                out[key] = value

    def _contained(self, least: Any, most: Any) -> tuple[Any, Any]:
        """Bounds of the length in place of a `contains` that every item satisfies."""
        at_least, at_most = (
            json_number(key, self._schema.get(key)) for key in ("minContains", "maxContains")
        )
        at_least = 1 if at_least is None else at_least
        if at_least == 0 and at_most is None:
            return least, most
        if not is_trivial(self._schema["contains"]) or not is_number(at_least):
            raise not_built("contains")
        least = max(least, at_least) if is_number(least) else at_least
        if is_number(at_most):
            most = min(most, at_most) if is_number(most) else at_most
        return least, most

    # Objects.

    def _object(self) -> None:
        schema, to = self._schema, self._to
        for key in MAPS:
            if not isinstance(schema.get(key, {}), dict):
                raise CannotFollow(f"{key} is not an object")
        if not isinstance(schema.get("required", []), list):
            raise CannotFollow("required is not a list of names")
        shape = _Shape(
            names={name: to.schema(each) for name, each in schema.get("properties", {}).items()},
            patterns={},
            more=to.schema(schema.get("additionalProperties", True)),
        )
        if not is_trivial(schema.get("unevaluatedProperties", True)):
            self._unevaluated(shape)
        of_all = list[Any]()
        for pattern, each in schema.get("patternProperties", {}).items():
            if pattern in _EVERY_NAME:
                of_all.append(to.schema(each))
            else:
                shape.patterns[rust_pattern(pattern)] = to.schema(each)
        if of_all:
            shape.names = {name: both(each, *of_all) for name, each in shape.names.items()}
            shape.patterns = {name: both(each, *of_all) for name, each in shape.patterns.items()}
            shape.more = both(*of_all)
        self._restrict_names(shape)
        self._list_names(shape)
        self._write(shape)
        self._dependencies()

    def _unevaluated(self, shape: _Shape) -> None:
        evaluated = self._to.looks.evaluated(self._schema)
        if not evaluated.has_all:
            shape.more = self._to.schema(self._schema["unevaluatedProperties"])
            for name in evaluated.names:
                shape.names.setdefault(name, True)
            shape.patterns = {rust_pattern(pattern): True for pattern in evaluated.patterns}

    def _restrict_names(self, shape: _Shape) -> None:
        """Apply `propertyNames`."""
        looks = self._to.looks
        rule = looks.dereferenced(self._schema.get("propertyNames", True))
        if is_trivial(rule):
            return
        keys = set[str]()
        if isinstance(rule, dict):
            name = rule.get("format")
            if isinstance(name, str) and name in FORMATS and "pattern" not in rule:
                rule = {**rule, "pattern": FORMATS[name]}
            keys = ASSERTIONS & rule.keys() - {"type"}
            if isinstance(name, str) and name not in LIBRARY_FORMATS:
                keys -= {"format"}
        values = looks.values(rule) if keys <= {"enum", "const"} else None
        if "string" not in looks.types(rule):
            values = frozenset[str]()
        elif not keys:
            return
        if shape.patterns:
            raise not_built("propertyNames")
        if values is not None:
            listed = values_of(rule)
            names = map(json.loads, sorted(values)) if listed is None else listed
            allowed = dict.fromkeys(name for name in names if isinstance(name, str))
            shape.names = {name: each if name in allowed else False for name, each in shape.names.items()}
            shape.names |= {name: shape.more for name in allowed if name not in shape.names}
        elif keys == {"pattern"} and isinstance(rule["pattern"], str):
            self._restrict_to(shape, rust_pattern(rule["pattern"]))
        elif keys <= {"minLength", "maxLength"}:
            least, most = (json_number(key, rule.get(key)) for key in LENGTHS)
            bounds = f"{0 if least is None else least},{'' if most is None else most}"
            self._restrict_to(shape, f"^(?s:.{{{bounds}}})$")
        else:
            raise not_built("propertyNames")
        shape.more = False

    def _restrict_to(self, shape: _Shape, pattern: str) -> None:
        matching = set(self._to.matching(pattern))
        if not matching.isdisjoint(shape.names) and not is_trivial(shape.more):
            raise not_built("propertyNames")  # the pattern would be for these names as well
        shape.names = {name: each if name in matching else False for name, each in shape.names.items()}
        if shape.more is not False:
            shape.patterns = {pattern: shape.more}

    def _list_names(self, shape: _Shape) -> None:
        """Replace patterns by names, if all names that they match are in the document.

        Otherwise llguidance would offer one more property after the last possible name.
        """
        to = self._to
        for pattern, schema in list(shape.patterns.items()):
            names = to.matching(pattern)
            if not has_other_names(names, inside=[pattern]):
                del shape.patterns[pattern]
                for name in names:
                    shape.names[name] = both(shape.names.get(name, True), schema)
        if shape.patterns and shape.more is not False:
            names = to.not_matching(list(shape.patterns))
            if not has_other_names(names, outside=shape.patterns):
                for name in names:
                    shape.names.setdefault(name, shape.more)
                shape.more = False
        alike = dict[str, list[str]]()
        for pattern, schema in shape.patterns.items():
            alike.setdefault(canonical(schema), []).append(pattern)
        shape.patterns = {_either(patterns): shape.patterns[patterns[0]] for patterns in alike.values()}

    def _write(self, shape: _Shape) -> None:
        schema, out = self._schema, self._out
        required = schema.get("required", [])
        if shape.names or "properties" in schema:
            out["properties"] = shape.names
        if shape.patterns:
            out["patternProperties"] = shape.patterns
        if shape.more is not True:
            out["additionalProperties"] = shape.more
        if required:
            out["required"] = required
        least, most = (json_number(key, schema.get(key)) for key in ("minProperties", "maxProperties"))
        is_closed = shape.more is False and not shape.patterns
        n_required = len(set(map(str, required)))
        if is_number(least) and least > n_required + 1 and not is_closed:
            raise not_built("minProperties")
        if least is not None and not (is_number(least) and least <= n_required):
            out["minProperties"] = least
        n_possible = sum(each is not False for each in shape.names.values())
        if most is not None and not (is_closed and is_number(most) and most >= n_possible):
            out["maxProperties"] = most

    def _dependencies(self) -> None:
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needed in self._schema.get(key, {}).items():
                if isinstance(needed, list):
                    present: Any = {"type": "object", "required": [*needed, name]}
                else:
                    present = both({"type": "object", "required": [name]}, self._to.schema(needed))
                self._also.append(any_of([{"properties": {name: False}}, present]))

    # Combinations.

    def _one_of(self, options: Any) -> None:
        """Rewrite to `anyOf` if the alternatives exclude each other; llguidance finds further such cases."""
        if not isinstance(options, list):
            self._out["oneOf"] = options
            return
        looks = self._to.looks
        options = [each for each in options if each is not False]
        rewritten = [self._to.schema(each) for each in options]
        try:
            tag = looks.tag_of(options)
            are_disjoint = looks.are_disjoint(options, tag)
        except TooManyLooks:
            tag, are_disjoint = None, False
        if are_disjoint:
            self._put(any_of(rewritten), "oneOf")
        elif tag is not None:  # an object without the tag may be valid by several: none is written
            self._put(any_of([both(each, {"required": [tag]}) for each in rewritten]), "oneOf")
        else:
            self._put({"oneOf": rewritten}, "oneOf")

    def _condition(self) -> None:
        """Apply `if` with `then` and `else`."""
        to, schema = self._to, self._schema
        condition, then, otherwise = schema["if"], schema.get("then", True), schema.get("else", True)
        if is_trivial(then) and is_trivial(otherwise):
            return
        holds = both(to.schema(condition), to.schema(then))
        if not is_trivial(condition):
            fails = self._negation(condition, schema.get("properties"))
            holds = any_of([holds, both(fails, to.schema(otherwise))])
        self._also.append(holds)

    def _negation(self, schema: Any, valid_by: Any = None) -> Any:
        """The schema of all values that are not valid by `schema`. Raises CannotFollow.

        `valid_by` are the `properties` by which the same value must be valid.
        """
        to = self._to
        with to.within():
            schema = to.looks.dereferenced(schema)
            if isinstance(schema, bool):
                return not schema
            if not isinstance(schema, dict):
                raise not_built("not")
            keys = [key for key in schema if key in ASSERTIONS]
            return any_of([each for key in keys for each in self._not(schema, key, valid_by)])

    def _not(self, schema: dict[str, Any], key: str, valid_by: Any) -> list[Any]:
        """Schemas of the values that are not valid by one keyword of `schema`."""
        value, to = schema[key], self._to
        if key == "type":
            return other_types(value)
        if key in REFERENCES:
            return [self._negation(to.document.target(schema, key), valid_by)]
        if key == "const":
            return not_constant(value)
        if key == "enum" and isinstance(value, list):
            return [both(*(any_of(not_constant(each)) for each in value))]
        if key == "required" and isinstance(value, list):
            return [{"type": "object", "properties": {str(each): False}} for each in value]
        if key == "properties" and isinstance(value, dict):
            return self._not_properties(value, valid_by if isinstance(valid_by, dict) else {})
        if key == "not":
            return [to.schema(value)]
        if key == "allOf" and isinstance(value, list):
            return [self._negation(each, valid_by) for each in value]
        if key == "anyOf" and isinstance(value, list):
            return [both(*(self._negation(each, valid_by) for each in value))]
        if key == "format" and isinstance(value, str) and value not in FORMATS.keys() | LIBRARY_FORMATS:
            return []
        if key in OPPOSITES and is_number(value):
            return OPPOSITES[key](json_number(key, value))
        raise CannotFollow(f"it has {key} inside of not or if: {NOT_BUILT['not']}")

    def _not_properties(self, properties: dict[str, Any], valid_by: Mapping[str, Any]) -> list[Any]:
        """Schemas of the objects with one property that is not valid by its schema in `properties`."""
        options = list[Any]()
        for name, schema in properties.items():
            # If the schema lists the property's values elsewhere: all those that `schema` does not allow.
            listed, meant = values_of(valid_by.get(name)), values_of(schema)
            if listed is not None and meant is not None and ASSERTIONS & schema.keys() <= _SIMPLE:
                types = self._to.looks.types(schema)
                texts = {canonical(each) for each in meant if type_of(each) in types}
                others = [each for each in listed if canonical(each) not in texts]
                rest = any_of([self._to.constant(each) for each in others])
            else:
                rest = self._negation(schema)
            if rest is not False:
                options.append({"type": "object", "properties": {name: rest}, "required": [name]})
        return options


def _either(patterns: Sequence[str]) -> str:
    """A pattern for the names that match one of these."""
    return patterns[0] if len(patterns) == 1 else "|".join(f"(?:{each})" for each in patterns)


def _names_in(document: Any) -> Iterator[str]:
    """All keys in a document, and all texts in lists that may name properties."""
    todo: list[Any] = [document]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            yield from value
            todo.extend(each for key, each in value.items() if key not in ("enum", "examples"))
            if isinstance(value.get("enum"), list):
                todo.extend(each for each in value["enum"] if not isinstance(each, str))
        elif isinstance(value, list):
            yield from (each for each in value if isinstance(each, str))
            todo.extend(each for each in value if not isinstance(each, str))
