"""The tools that a request offers the model, and whether it must call one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedTool:
    """A function. `parameters` is the JSON schema of its arguments, None if it has none.

    With `strict` its schema is always enforced. Without, a reply that need not call it may do without the
    schema if no grammar can be made of it: then its arguments are any JSON object.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The schema that arguments follow. Unless it speaks of further properties it has none."""
        if self.parameters is None:
            return {**_ANY_OBJECT, "additionalProperties": False}
        schema = {**_ANY_OBJECT, **self.parameters}
        if "properties" in schema and not _MORE & schema.keys():
            schema["additionalProperties"] = False
        return schema

    @property
    def loose_schema(self) -> dict[str, Any]:
        """That of any arguments, unless it is `strict`."""
        return self.schema if self.strict else _ANY_OBJECT

    @property
    def n_characters(self) -> int:
        """The size of the schema, as JSON."""
        return 0 if self.parameters is None else len(json.dumps(self.parameters))


# What may name further properties.
_MORE = {"additionalProperties", "unevaluatedProperties", "patternProperties"}
_MORE |= {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolWish:
    """The `tools` that may be called; with `must_call` the reply is a call, and with `parallel` it may have
    more
    than one.
    """

    tools: Sequence[OfferedTool] = field(default_factory=tuple[OfferedTool, ...])
    must_call: bool = False
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """The functions' names."""
        return frozenset(tool.name for tool in self.tools)


NO_TOOLS = ToolWish()
