"""All formats of tool calls and of reasoning, by name, and which of them a model has."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from orca_jax.errors import ConfigError
from server.gateway.chat_template import Templates
from server.gateway.reply.reasoning_format import REASONING_FORMATS, ReasoningFormat
from server.gateway.tool_formats.hermes import HERMES
from server.gateway.tool_formats.tool_format import ToolFormat

F = TypeVar("F", ToolFormat, ReasoningFormat)

AUTO, NONE = "auto", "none"
TOOL_FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in (HERMES,)}


class ReplyFormats(NamedTuple):
    """How a model's replies have tool calls and reasoning; None: as text like any other."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None


def reply_formats(templates: Templates | None, tools: str = AUTO, reasoning: str = AUTO) -> ReplyFormats:
    """The formats with these names, `auto` being those of the model's chat templates. Raises ConfigError."""
    sources = [] if templates is None else templates.sources
    return ReplyFormats(
        _chosen("tool_format", TOOL_FORMATS, tools, sources),
        _chosen("reasoning_format", REASONING_FORMATS, reasoning, sources),
    )


def _chosen(field: str, formats: Mapping[str, F], name: str, sources: Sequence[str]) -> F | None:
    if name == NONE:
        return None
    if name == AUTO:
        return next((each for each in formats.values() if any(map(each.is_of, sources))), None)
    if name not in formats:
        known = ", ".join((AUTO, NONE, *formats))
        raise ConfigError(f"{field} is {name!r}; it must be one of {known}")
    return formats[name]
