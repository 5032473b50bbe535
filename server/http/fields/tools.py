"""The request fields about tools: which ones are offered, and whether the model must call one."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from orca_jax.errors import InvalidRequest, NotSupported, shown
from orca_jax.request.chat.tools import NO_TOOLS, OfferedTool, ToolWish
from server.http.fields.hints import HINTS
from server.http.fields.strict import Strict, Unused, take_extra

_TOOL = ("type", "function")
_FUNCTION = ("name", "description", "parameters", "strict")


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


def checked_tools(tools: Sequence[dict[str, Any]], unused: Unused) -> list[dict[str, Any]]:
    """The tools of a chat request for the chat template, without nulls and unused fields.

    Raises InvalidRequest for an unknown field. `check_tools` checks the values.
    """
    checked = list[dict[str, Any]]()
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if isinstance(function, dict):
            tool = _known(tool, _TOOL, unused, f"tools.{i}.", "tools.")
            path = f"tools.{i}.function."
            tool["function"] = _known(function, _FUNCTION, unused, path, "tools.function.")
        checked.append(tool)
    return checked


def _known(
    fields: dict[str, Any], names: tuple[str, ...], unused: Unused, path: str, place: str
) -> dict[str, Any]:
    others = {name: value for name, value in fields.items() if name not in names}
    take_extra(others, names, HINTS["tools of chat"], unused, path, place)
    return {name: value for name, value in fields.items() if name in names and value is not None}


def check_left_out(tools: Sequence[Strict] | None, left_out: type[Strict], *, forced: bool) -> None:
    """Check that a request makes sense without its tools of the type `left_out`, which the server cannot run.

    Raises NotSupported if the model must call a tool (`forced`), or if the request has no other tool.
    """
    for i, tool in enumerate(tools or ()):
        if isinstance(tool, left_out) and (forced or all(isinstance(each, left_out) for each in tools or ())):
            why = "the model must call a tool" if forced else "the request has no other tool"
            message = f"tools.{i}.type is not built yet, and {why}; leave it out, or offer a function"
            raise NotSupported(message, param=f"tools.{i}.type")


def tool_wish(
    tools: Sequence[OfferedTool],
    choice: Literal["none", "auto", "required"] | ToolChoice | None,
    *,
    parallel: bool,
) -> ToolWish:
    """Read which tools the model may call, and whether it must call one. Raises InvalidRequest."""
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
