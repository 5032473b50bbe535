"""Conversations as prompts of a model: one or several, with its template or another."""

from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import CorruptFile, InvalidRequest, NotSupported
from orca_jax.request.chat.chat_prompts import ChatPrompts
from orca_jax.request.chat.chat_template import BadConversation, ChatTemplate, NamedTemplates, UnknownTemplate
from tests.host.engines import LETTERS

TURNS = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
PROMPT = "{% if add_generation_prompt %}a:{% endif %}"
TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
HELLO = [{"role": "user", "content": "hello"}]
BYE = [*HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "bye"}]
TOOL = {"type": "function", "function": {"name": "look"}}


def prompts(**changes: Any) -> ChatPrompts:
    named = {"default": ChatTemplate(TURNS + PROMPT), "tool_use": ChatTemplate(TOOLS + TURNS + PROMPT)}
    values: dict[str, Any] = {"model": "tiny", "tokenizer": LETTERS, "templates": NamedTemplates(named)}
    return ChatPrompts(**{**values, **changes})


def texts(listed: list[list[int]]) -> list[str]:
    return [LETTERS.decode(ids) for ids in listed]


def test_one_conversation_or_several() -> None:
    assert texts(prompts().listed(HELLO)) == ["u:hello;a:"]
    assert texts(prompts().listed([HELLO])) == ["u:hello;a:"]
    assert texts(prompts().listed((tuple(HELLO), BYE))) == ["u:hello;a:", "u:hello;a:hi;u:bye;a:"]


def test_how_the_prompt_ends() -> None:
    begun = [*HELLO, {"role": "assistant", "content": "h"}]
    assert texts(prompts().listed(HELLO, add_generation_prompt=False)) == ["u:hello;"]
    assert texts(prompts().listed(begun, continue_final_message=True)) == ["u:hello;a:h"]


def test_which_template_renders(tmp_path: Path) -> None:
    assert texts(prompts().listed(HELLO, tools=[TOOL])) == ["[look]u:hello;a:"], "the one for tools"
    assert texts(prompts().listed(HELLO, chat_template="tool_use")) == ["u:hello;a:"]
    (tmp_path / "other.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ mood }}")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "^"}')
    mine = prompts(directory=tmp_path, templates=None)
    for given in (tmp_path / "other.jinja", (tmp_path / "other.jinja").read_text()):
        assert texts(mine.listed(HELLO, chat_template=given)) == ["^hello"]
        listed = mine.listed(HELLO, chat_template=given, chat_template_kwargs={"mood": "!"})
        assert texts(listed) == ["^hello!"]


@pytest.mark.parametrize(
    ("tool", "param", "message"),
    [
        (1, "tools.0", "tools.0 is 1; it must be an object"),
        ({"name": "look"}, "tools.0.type", "tools.0.type is null; it must be 'function'"),
        (
            {**TOOL, "function": {"name": "a b"}},
            "tools.0.function.name",
            "must be a text of 1 to 128 letters",
        ),
    ],
)
def test_tools_are_checked_as_over_http(tool: Any, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        prompts().listed(HELLO, tools=[tool])
    assert caught.value.param == param


def test_special_tokens_are_not_added_twice() -> None:
    class Tokenizer:
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [0] * add_special_tokens + [1]

    assert prompts(tokenizer=Tokenizer()).listed(HELLO) == [[1]]


@pytest.mark.parametrize(
    ("changes", "arguments", "kind", "param", "message"),
    [
        ({"tokenizer": None}, {"messages": HELLO}, NotSupported, "messages", "tiny has no tokenizer"),
        (
            {"templates": None},
            {"messages": HELLO},
            NotSupported,
            "messages",
            "tiny has no chat template; give",
        ),
        ({"has_encoder": True}, {"messages": HELLO}, NotSupported, "messages", "tiny has an encoder"),
        (
            {"templates": ChatTemplate(TURNS)},
            {"messages": HELLO, "tools": [TOOL]},
            NotSupported,
            "tools",
            "does not show tools",
        ),
        ({}, {"messages": []}, BadConversation, "messages", "empty list"),
        ({}, {"messages": "hello"}, InvalidRequest, "messages", "messages is str"),
        ({}, {"messages": [HELLO, "hello"]}, InvalidRequest, "messages", "conversation 1 is str"),
        ({}, {"messages": [HELLO, []]}, BadConversation, "messages", "conversation 1: .*empty list"),
        (
            {},
            {"messages": HELLO, "chat_template": "other"},
            UnknownTemplate,
            "chat_template",
            "no chat template 'other'",
        ),
    ],
)
def test_what_cannot_be_a_prompt(
    changes: dict[str, Any], arguments: dict[str, Any], kind: type[InvalidRequest], param: str, message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        prompts(**changes).listed(**arguments)
    assert caught.value.param == param


def test_a_template_with_a_mistake() -> None:
    with pytest.raises(CorruptFile, match="line 1"):
        prompts().listed(HELLO, chat_template="{% if %}")
