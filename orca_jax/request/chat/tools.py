"""The tools that a request offers the model, and whether it must call one."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orca_jax.errors import InvalidRequest, shown

MAX_TOOLS = 128
MAX_SCHEMAS = 1 << 16  # characters of all parameters together, as JSON
_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedTool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments, or None.

    With `strict` the schema is always enforced. Otherwise, if no grammar can be made of the schema and the
    reply need not call the function, its arguments are any JSON object.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the arguments. It forbids further properties unless it mentions them."""
        if self.parameters is None:
            return {**_ANY_OBJECT, "additionalProperties": False}
        schema = {**_ANY_OBJECT, **self.parameters}
        if "properties" in schema and not _MORE & schema.keys():
            schema["additionalProperties"] = False
        return schema

    @property
    def loose_schema(self) -> dict[str, Any]:
        """The schema of any object; for a `strict` tool its `schema`."""
        return self.schema if self.strict else _ANY_OBJECT

    @property
    def n_characters(self) -> int:
        """The size of the schema, as JSON."""
        return 0 if self.parameters is None else len(json.dumps(self.parameters))


# Keywords that may allow or name further properties.
_MORE = {"additionalProperties", "unevaluatedProperties", "patternProperties"}
_MORE |= {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolWish:
    """The tools that a reply may call: with `must_call` at least one, with `parallel` several."""

    tools: Sequence[OfferedTool] = field(default_factory=tuple[OfferedTool, ...])
    must_call: bool = False
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """The functions' names."""
        return frozenset(tool.name for tool in self.tools)


NO_TOOLS = ToolWish()


def check_tools(tools: Sequence[Any], paths: Sequence[str] | None = None) -> list[OfferedTool]:
    """Check the tools of a request. `paths` are their places in it; by default a list `tools`.

    Raises InvalidRequest, which names the field at fault.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} tools; {MAX_TOOLS} are allowed", param="tools")
    offered = dict[str, OfferedTool]()
    for i, tool in enumerate(tools):
        place = f"tools.{i}" if paths is None else paths[i]
        if not isinstance(tool, Mapping):
            message = f"{place} is {shown(tool)}; it must be an object with a type and a function"
            raise InvalidRequest(message, param=place)
        one = _tool(tool, place)
        if one.name in offered:
            path = f"{place}.function.name"
            raise InvalidRequest(f"{path} is {one.name!r}, which another tool has; rename it", param=path)
        offered[one.name] = one
    n = sum(tool.n_characters for tool in offered.values())
    if n > MAX_SCHEMAS:
        message = f"the parameters of tools have {n} characters as JSON; {MAX_SCHEMAS} are allowed"
        raise InvalidRequest(message, param="tools")
    return list(offered.values())


def _tool(tool: Mapping[str, Any], path: str) -> OfferedTool:
    function: Any = tool.get("function")
    parts: Mapping[str, Any] = function if isinstance(function, Mapping) else {}
    name, parameters, strict = parts.get("name"), parts.get("parameters"), parts.get("strict")
    is_name = isinstance(name, str) and _NAME.fullmatch(name) is not None
    is_schema = parameters is None
    if isinstance(parameters, Mapping):
        is_schema = parameters.get("type", "object") == "object"
    for name_of_field, value, is_valid, rule in (
        ("type", tool.get("type"), tool.get("type") == "function", "'function'"),
        ("function", function, isinstance(function, Mapping), "an object with a name"),
        ("function.name", name, is_name, "a text of 1 to 128 letters, digits and _ - . : /"),
        (
            "function.description",
            parts.get("description"),
            isinstance(parts.get("description"), str | None),
            "a text",
        ),
        ("function.parameters", parameters, is_schema, "a JSON schema of an object"),
        ("function.strict", strict, isinstance(strict, bool | None), "true or false"),
    ):
        if not is_valid:
            message = f"{path}.{name_of_field} is {shown(value)}; it must be {rule}"
            raise InvalidRequest(message, param=f"{path}.{name_of_field}")
    return OfferedTool(name=parts["name"], parameters=parameters, strict=strict is True)
