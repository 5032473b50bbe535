"""The request fields of tools: what is offered, and whether the model must call one."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from orca_jax.errors import InvalidRequest
from server.gateway.reply.offered_tools import NO_TOOLS, OfferedTool, ToolWish
from server.http.fields.strict import Strict
from server.http.fields.validation import shown

MAX_TOOLS = 128
MAX_SCHEMAS = 1 << 16  # characters of all parameters together, as JSON
_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,64}")
_FUNCTION = {"name", "description", "parameters", "strict"}


class NamedFunction(Strict):
    """The function of `tool_choice`."""

    name: str


class AllowedTools(Strict):
    """`tool_choice.allowed_tools`: some of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[
        list[dict[str, Any]], Field(description='{"type": "function", "function": {"name": ...}}')
    ]


class ToolChoice(Strict):
    """`tool_choice` as an object."""

    type: Literal["function", "allowed_tools"]
    function: Annotated[NamedFunction | None, Field(description="call this one")] = None
    allowed_tools: Annotated[AllowedTools | None, Field(description="only these may be called")] = None


def check_tools(tools: Sequence[dict[str, Any]]) -> list[OfferedTool]:
    """The tools of a request. Raises InvalidRequest, which names the field at fault."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} tools; {MAX_TOOLS} are allowed", param="tools")
    offered = dict[str, OfferedTool]()
    for i, tool in enumerate(tools):
        one = _tool(tool, f"tools.{i}")
        if one.name in offered:
            path = f"tools.{i}.function.name"
            raise InvalidRequest(f"{path} is {one.name!r}, which another tool has; rename it", param=path)
        offered[one.name] = one
    n = sum(tool.n_characters for tool in offered.values())
    if n > MAX_SCHEMAS:
        message = f"the parameters of tools have {n} characters as JSON; {MAX_SCHEMAS} are allowed"
        raise InvalidRequest(message, param="tools")
    return list(offered.values())


def tool_wish(
    tools: Sequence[OfferedTool],
    choice: Literal["none", "auto", "required"] | ToolChoice | None,
    *,
    parallel: bool,
) -> ToolWish:
    """Which of the request's tools may and must be called. Raises InvalidRequest."""
    if choice == "none":
        return NO_TOOLS
    if choice is None or choice == "auto":
        return ToolWish(tools=tools, parallel=parallel)
    if not tools:
        message = "tool_choice is given without tools; give at least one tool, or leave tool_choice out"
        raise InvalidRequest(message, param="tool_choice")
    if choice == "required":
        return ToolWish(tools=tools, must_call=True, parallel=parallel)
    if choice.type == "function":
        name = None if choice.function is None else choice.function.name
        return ToolWish(tools=_named(tools, [name], "function.name"), must_call=True, parallel=False)
    allowed = choice.allowed_tools
    if allowed is None or not allowed.tools:
        path = "tool_choice.allowed_tools.tools"
        raise InvalidRequest(f"{path} is empty; name at least one of the tools", param=path)
    names = [_path(tool, "function", "name") for tool in allowed.tools]
    return ToolWish(
        tools=_named(tools, names, "allowed_tools.tools"),
        must_call=allowed.mode == "required",
        parallel=parallel,
    )


def _named(tools: Sequence[OfferedTool], names: Sequence[Any], field: str) -> list[OfferedTool]:
    known = {tool.name: tool for tool in tools}
    for name in names:
        if not isinstance(name, str) or name not in known:
            path = f"tool_choice.{field}"
            message = f"{path} is {shown(name)}; it must be the name of one of tools"
            raise InvalidRequest(message, param=path)
    return [known[name] for name in dict.fromkeys(names)]


def _path(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _tool(tool: dict[str, Any], path: str) -> OfferedTool:
    function: Any = tool.get("function")
    parts: dict[str, Any] = function if isinstance(function, dict) else {}
    name, parameters, strict = parts.get("name"), parts.get("parameters"), parts.get("strict")
    is_name = isinstance(name, str) and _NAME.fullmatch(name) is not None
    is_schema = isinstance(parameters, dict | None) and _is_of_objects(parameters)
    unknown = next(iter(parts.keys() - _FUNCTION), None)
    for field, value, is_valid, rule in (
        ("type", tool.get("type"), tool.get("type") == "function", "'function'"),
        ("function", function, isinstance(function, dict), "an object with a name"),
        ("function.name", name, is_name, "a text of 1 to 64 letters, digits and _ - . : /"),
        (
            "function.description",
            parts.get("description"),
            isinstance(parts.get("description"), str | None),
            "a text",
        ),
        ("function.parameters", parameters, is_schema, "a JSON schema of an object"),
        ("function.strict", strict, isinstance(strict, bool | None), "true or false"),
        (f"function.{unknown}", parts.get(unknown or ""), unknown is None, "left out: it is not known here"),
    ):
        if not is_valid:
            message = f"{path}.{field} is {shown(value)}; it must be {rule}"
            raise InvalidRequest(message, param=f"{path}.{field}")
    return OfferedTool(name=parts["name"], parameters=parameters, strict=strict is True)


def _is_of_objects(schema: dict[str, Any] | None) -> bool:
    return schema is None or schema.get("type", "object") == "object"
