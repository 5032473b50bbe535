"""All formats of tool calls and of reasoning, by name, and the choice among them for a model."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from orca_jax.errors import ConfigError
from orca_jax.request.chat.chat_template import Templates
from server.gateway.reply.reasoning_format import GRANITE, MISTRAL_REASONING, THINK, ReasoningFormat
from server.gateway.tool_formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from server.gateway.tool_formats.gemma import GEMMA
from server.gateway.tool_formats.gpt_oss import GPT_OSS, GPT_OSS_REASONING
from server.gateway.tool_formats.hermes import HERMES
from server.gateway.tool_formats.llama3 import LLAMA3
from server.gateway.tool_formats.mistral import MISTRAL, MISTRAL_V11
from server.gateway.tool_formats.tool_format import ToolFormat

F = TypeVar("F", ToolFormat, ReasoningFormat)

AUTO, NONE = "auto", "none"
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    each.name: each
    for each in (HERMES, LLAMA3, MISTRAL, MISTRAL_V11, GEMMA, GPT_OSS, DEEPSEEK_V3, DEEPSEEK_V31)
}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    each.name: each for each in (THINK, MISTRAL_REASONING, GRANITE, GPT_OSS_REASONING)
}


class ReplyFormats(NamedTuple):
    """The formats of tool calls and reasoning in a model's replies; None to treat them as text."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None


def reply_formats(templates: Templates | None, tools: str = AUTO, reasoning: str = AUTO) -> ReplyFormats:
    """The formats with these names; `auto` recognises them in the chat templates. Raises ConfigError."""
    sources = [] if templates is None else templates.sources
    formats = ReplyFormats(
        _chosen("tool_format", TOOL_FORMATS, tools, sources),
        _chosen("reasoning_format", REASONING_FORMATS, reasoning, sources),
    )
    names = [each.name for each in formats if each is not None]
    if len(set(names)) == 2 and GPT_OSS.name in names:
        message = f"tool_format is {names[0]!r} and reasoning_format is {names[1]!r}; gpt_oss can be combined"
        raise ConfigError(f"{message} only with gpt_oss or none")
    return formats


def _chosen(field: str, formats: Mapping[str, F], name: str, sources: Sequence[str]) -> F | None:
    if name == NONE:
        return None
    if name == AUTO:
        return next((each for each in formats.values() if any(map(each.is_of, sources))), None)
    if name not in formats:
        known = ", ".join((AUTO, NONE, *formats))
        raise ConfigError(f"{field} is {name!r}; it must be one of {known}")
    return formats[name]
