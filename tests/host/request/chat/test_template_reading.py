"""Templates that take only one form of a conversation get that form, and no text is lost on the way."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.errors import InvalidRequest, NotSupported
from orca_jax.request.chat import chat_template
from orca_jax.request.chat.chat_template import BadConversation, ChatTemplate, NamedTemplates
from orca_jax.request.chat.conversation import left_out, prompt_text
from orca_jax.request.chat.template_reading import TemplateReading

USER = {"role": "user", "content": "w?"}
LONG_ID = "call_4fA9xQ0bT7mZcK2vLw8sYdRj"


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def call(name: str = "f", arguments: Any = '{"a": 1}', id: str = "c1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*given: dict[str, Any], content: Any = None) -> dict[str, Any]:
    return message("assistant", content, tool_calls=list(given))


def result(content: Any = "3", id: str = "c1") -> dict[str, Any]:
    return message("tool", content, tool_call_id=id)


def shown(source: str, *messages: dict[str, Any], **options: Any) -> str:
    return prompt_text(ChatTemplate(source), messages, **options)


def reading(source: str, *, has_tools: bool = False) -> TemplateReading:
    return ChatTemplate(source).reading(has_tools=has_tools)


TOOL_CALLS = json.dumps([call("f", {})])

# Fragments of templates as published, each with what matters of it.
CHATML = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
# Mistral Small 3.2 and Devstral, Kimi K2: a tool's content is printed as it is.
TOOL_AS_TEXT = (
    "{% for m in messages %}{% if m.role == 'tool' %}[T]{{ m['content'] | string }}"
    "{% elif m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for block in m['content'] %}{{ block.text }}{% endfor %}"
    "{% endif %}{% endfor %}"
)
# Gemma 3, Mistral Small 3: of a system message's parts only the first is read.
FIRST_PART = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{{ m['content'][0]['text'] }}{% endif %}{% elif m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for block in m['content'] %}{{ block.text }}{% endfor %}{% endif %}|{% endfor %}"
)
# DeepSeek V3 and R1: calls are shown where the content is none, and arguments are text.
DEEPSEEK = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{% for c in m['tool_calls'] %}"
    "{{ '[' + c['function']['name'] + ' ' + c['function']['arguments'] + ']' }}{% endfor %}"
    "{% else %}{{ '<' + m['content'] + '>' }}{% endif %}{% endfor %}"
)
# Hermes, Qwen 2.5: arguments are an object.
HERMES = (
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}'
    "{% else %}<{{ m.content }}>{% endif %}{% endfor %}"
)
# GLM 4.5, Qwen3-Coder: the arguments' items are written one by one.
ITEMS = (
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}[{{ c.function.name }}"
    "{% for key, value in c.function.arguments.items() %} {{ key }}={{ value | tojson }}{% endfor %}]"
    "{% endfor %}"
    "{% else %}<{{ m.content }}>{% endif %}{% endfor %}"
)
# gpt-oss, Qwen 3's first: content is searched, so it must not be null.
SEARCHED = (
    "{% for m in messages %}{% if 'content' in m and '<think>' in m.content %}!{% endif %}"
    "<{{ m.content or (m.tool_calls | tojson) }}>{% endfor %}"
)
# Llama 3: whatever content is, it is printed.
PRINTED = "{% for m in messages %}<{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}>{% endfor %}"
# Mistral's: the system message is shown with the last user's, if no message comes after that.
SYSTEM_AT_END = (
    "{% set system = messages[0].content if messages[0].role == 'system' %}"
    "{% for m in messages if m.role != 'system' %}<"
    "{{ system + ' ' if system and loop.last and m.role == 'user' }}"
    "{{ m.content or (m.tool_calls | tojson) }}>{% endfor %}"
)
# Llama 3.1: one call a message.
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('only single tool-calls at once') }}{% endif %}"
    "[{{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}]"
    "{% else %}<{{ m.content }}>{% endif %}{% endfor %}"
)
# Mistral 7B v0.3 and Nemo: ids of nine characters.
SHORT_IDS = (
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('length 9') }}{% endif %}[{{ c.id }} {{ c.function | tojson }}]{% endfor %}"
    "{% else %}<{{ m.content }} {{ m.tool_call_id }}>{% endif %}{% endfor %}"
)
# Functionary: a result has the tool's name.
NAMED_RESULTS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '(' + m.name + ': ' + m.content + ')' }}"
    "{% elif m.tool_calls %}"
    "{% for c in m.tool_calls %}{{ '[' + c.function.name + c.function.arguments + ']' }}{% endfor %}"
    "{% else %}<{{ m.content }}>{% endif %}{% endfor %}"
)
# gpt-oss: only the first message may be the system's; Qwen 3.5 refuses others.
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}S:{{ messages[0].content }}{% set rest = messages[1:] %}{% else %}"
    "{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role in ('user', 'assistant') %}<{{ m.content }}>{% endif %}{% endfor %}"
)
# Gemma 4's first: an object is written in the model's form, and a text as it comes.
OWN_FORM = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% set a = c.function.arguments %}[{{ c.function.name }}"
    "{% if a is mapping %}{% for key in a %} {{ key }}={{ a[key] }}{% endfor %}{% else %} {{ a }}{% endif %}]"
    "{% endfor %}<{{ m.content or '' }}>{% endfor %}"
)
# Cohere's: no reply after a tool's result.
FIRST_RESULT = (
    "{% for m in messages %}"
    "{% if not loop.last and m.role == 'tool' %}{{ raise_exception('alternate') }}{% endif %}"
    "<{{ m.content or (m.tool_calls | tojson) }}>{% endfor %}"
)
NO_SYSTEM = "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.content }}>{% endfor %}"
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.content }}>{% endfor %}"
)
PARTS_ALONE = "{% for m in messages %}<{% for part in m.content %}{{ part.text }}{% endfor %}>{% endfor %}"
DESCRIBED = (
    "{% for tool in tools or [] %}{{ '// ' + tool.function.description }}"
    "{% for name, value in tool.function.parameters.properties.items() %} {{ name + value.description }}"
    "{% endfor %};{% endfor %}"
    "{% for m in messages %}<{{ m.content }}>{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        (CHATML, [message("system", parts("one", "two")), USER], "<system>one\ntwo<user>w?"),
        (TOOL_AS_TEXT, [USER, calls(call(), content=""), result(parts("3", "degrees"))], "w?[T]3\ndegrees"),
        (TOOL_AS_TEXT, [message("user", parts("one", "two"))], "onetwo"),  # as the template joins them
        (FIRST_PART, [message("system", parts("Be. ", "Never.")), USER], "Be. \nNever.|w?|"),
        (PARTS_ALONE, [message("system", "one"), message("user", parts("two", "three"))], "<one><twothree>"),
        (DEEPSEEK, [USER, calls(call()), result()], '<w?>[f {"a": 1}]<3>'),
        (DEEPSEEK, [USER, calls(call(arguments={"a": 1})), result()], '<w?>[f {"a": 1}]<3>'),
        (DEEPSEEK, [USER, calls(call(), content=""), result()], '<w?>[f {"a": 1}]<3>'),
        (DEEPSEEK, [USER, calls(call(), content="Hm."), result()], '<w?><Hm.>[f {"a": 1}]<3>'),
        (DEEPSEEK, [USER, calls(call(arguments='{"a')), result()], '<w?>[f {"a]<3>'),
        (DEEPSEEK, [USER, calls(call(arguments="")), result()], "<w?>[f {}]<3>"),
        (HERMES, [USER, calls(call()), result()], '<w?>{"name": "f", "arguments": {"a": 1}}<3>'),
        (HERMES, [USER, calls(call(arguments='{"a'))], '<w?>{"name": "f", "arguments": "{\\"a"}'),
        (ITEMS, [USER, calls(call()), result()], "<w?>[f a=1]<3>"),
        (ITEMS, [USER, calls(call(arguments='{"a'))], '<w?>[f arguments="{\\"a"]'),
        (ITEMS, [USER, calls(call(arguments="[1]"))], '<w?>[f arguments="[1]"]'),
        (
            ONE_CALL,
            [USER, calls(call(), call("g", "{}", "c2")), result("noon", "c2"), result()],
            '<w?>[f {"a": 1}]<3>[g {}]<noon>',
        ),
        (
            ONE_CALL,  # results of no call come after the others
            [USER, calls(call(), call("g", "{}", "c2")), result("?", "c9"), result()],
            '<w?>[f {"a": 1}]<3>[g {}]<?>',
        ),
        (SEARCHED, [USER, calls(call("f", {})), result()], f"<w?><{TOOL_CALLS}><3>"),
        (PRINTED, [USER, calls(call("f", {})), result()], f"<w?><{TOOL_CALLS}><3>"),
        (SYSTEM_AT_END, [message("system", "s"), USER], "<s w?>"),
        (SYSTEM_AT_END, [message("system", "s"), USER, message("assistant", "a")], "<s\n\nw?><a>"),
        (
            SYSTEM_AT_END,
            [message("system", "s"), USER, calls(call("f", {})), result()],
            f"<s\n\nw?><{TOOL_CALLS}><3>",
        ),
        (OWN_FORM, [USER, calls(call()), result()], "<w?>[f a=1]<><3>"),
        (NAMED_RESULTS, [USER, calls(call()), result()], '<w?>[f{"a": 1}](f: 3)'),
        (FIRST_SYSTEM, [message("system", "a"), message("developer", "b"), USER], "S:a\n\nb<w?>"),
        (FIRST_SYSTEM, [message("system", "a"), USER, message("system", "b"), USER], "S:a\n\nb<w?><w?>"),
        (FIRST_SYSTEM, [USER, message("developer", "b"), USER], "S:b<w?><w?>"),
        (NO_SYSTEM, [message("developer", "a"), USER], "<a\n\nw?>"),
        (NO_SYSTEM, [message("system", "a"), USER, message("assistant", "b"), USER], "<w?><b><a\n\nw?>"),
        (ALTERNATE, [USER, USER, message("assistant", "b")], "<w?\n\nw?><b>"),
        (CHATML, [message("developer", "a"), USER], "<system>a<user>w?"),
        (FIRST_SYSTEM + "{# developer #}", [message("developer", "a"), USER], "S:a<w?>"),
        (FIRST_RESULT, [USER, calls(call("f", {}))], f"<w?><{TOOL_CALLS}>"),
        (CHATML + "{# developer #}", [message("developer", "a"), USER], "<developer>a<user>w?"),
        (CHATML, [USER, message("assistant", None), USER], "<user>w?<assistant><user>w?"),
    ],
)
def test_the_template_gets_the_form_that_it_reads(
    source: str, messages: list[dict[str, Any]], expected: str
) -> None:
    before = json.dumps(messages)
    assert shown(source, *messages) == expected
    assert json.dumps(messages) == before  # the caller's messages are left alone


def test_ids_of_calls_are_shortened_alike_in_calls_and_results() -> None:
    text = shown(SHORT_IDS, USER, calls(call(id=LONG_ID)), result(id=LONG_ID))
    first, second = text.split("[")[1].split(" ")[0], text.split("<3 ")[1].rstrip(">")
    assert first == second and len(first) == 9 and first.isalnum()
    assert "[abcdefghi " in shown(SHORT_IDS, USER, calls(call(id="abcdefghi")), result(id="abcdefghi"))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ({"name": "f"}, "// ;<w?>"),
        ({"name": "f", "description": "Does.", "parameters": None}, "// Does.;<w?>"),
        ({"name": "f", "description": "Does.", "parameters": {"type": "object"}}, "// Does.;<w?>"),
        ({"name": "f", "parameters": {"properties": {"a": {}, "b": {"description": "!"}}}}, "//  a b!;<w?>"),
    ],
)
def test_a_tool_may_leave_out_what_openai_leaves_optional(function: dict[str, Any], expected: str) -> None:
    tools = [{"type": "function", "function": function}]
    assert shown(DESCRIBED, USER, tools=tools) == expected


def test_a_tool_is_not_changed_where_it_need_not_be() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    source = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert shown(source, USER, tools=tools) == json.dumps(tools) + "w?"


def test_results_that_would_be_lost_are_refused() -> None:
    source = "{% for m in messages if m.role != 'tool' %}<{{ m.content or m.tool_calls }}>{% endfor %}"
    with pytest.raises(NotSupported, match="leaves messages of the role tool out") as caught:
        shown(source, USER, calls(call()), result())
    assert caught.value.param == "messages.2"


def test_results_that_would_be_lost_at_the_end_are_refused() -> None:
    refusal = "{% if not loop.last %}{{ raise_exception('alternate') }}{% endif %}"
    shows = "<{{ m.content or 'call' }}>"
    source = "{% for m in messages %}{% if m.role == 'tool' %}" + refusal + "{% else %}" + shows
    with pytest.raises(NotSupported, match="leaves messages of the role tool out"):
        shown(source + "{% endif %}{% endfor %}", USER, calls(call()), result())


def test_a_slow_template_is_read_in_bounded_time() -> None:
    ticks = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    slow = ChatTemplate(ticks + CHATML, max_seconds=0.05)
    assert slow.reading(has_tools=False) == TemplateReading()
    with pytest.raises(BadConversation, match=r"more than 0\.05 seconds"):
        prompt_text(slow, [USER])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, None),  # it shows no tools, so requests with tools are refused
        (HERMES + "{{ tools }}", None),
        (CHATML + "{{ tools }}", "but not the calls of earlier replies"),
        (NO_SYSTEM + "{{ tools }}", "but not the calls of earlier replies and the results of tools"),
    ],
)
def test_what_a_template_leaves_out_is_said(source: str, expected: str | None) -> None:
    found = left_out(ChatTemplate(source))
    assert found is expected is None or (expected is not None and expected in (found or ""))
    assert left_out(NamedTemplates({"rag": ChatTemplate(source)})) is None


def test_a_reading_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(HERMES + "{{ tools }}")
    NamedTemplates({"default": template}).read_ahead()
    monkeypatch.setattr(chat_template, "probe", None)
    assert (
        template.reading(has_tools=False).arguments == template.reading(has_tools=True).arguments == "object"
    )


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (["Hi"], "messages.0"),
        ([{"content": "Hi"}], "messages.0.role"),
        ([message("boss", "Hi")], "messages.0.role"),
        ([USER, message("user", None)], "messages.1.content"),
        ([message("user", 5)], "messages.0.content"),
        ([message("user", ["Hi"])], "messages.0.content.0"),
        ([message("user", [{"type": "text", "text": 5}])], "messages.0.content.0"),
        ([message("user", [{"type": "image_url", "image_url": {}}])], "messages.0.content.0.type"),
        ([message("user", "Hi", tool_calls=[call()])], "messages.0.tool_calls"),
        ([message("user", "Hi", tool_call_id="c1")], "messages.0.tool_call_id"),
        ([message("assistant", None, tool_calls="f")], "messages.0.tool_calls"),
        ([message("assistant", None, tool_calls=[{}])], "messages.0.tool_calls.0"),
        ([calls(call(arguments=5))], "messages.0.tool_calls.0.function.arguments"),
        ([calls({**call(), "id": 5})], "messages.0.tool_calls.0.id"),
        ([], "messages"),
    ],
)
def test_a_bad_message_is_named(given: list[Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prompt_text(ChatTemplate(CHATML), given)
    assert caught.value.param == param


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
CONTENTS = TEXTS | st.lists(TEXTS, min_size=1, max_size=3).map(lambda texts: parts(*texts))
TURNS = st.lists(
    st.builds(message, st.sampled_from(["system", "developer", "user"]), CONTENTS)
    | st.builds(message, st.just("assistant"), CONTENTS | st.none()),
    max_size=6,
)
SOURCES = [CHATML, TOOL_AS_TEXT, FIRST_PART, DEEPSEEK, HERMES, ONE_CALL, FIRST_SYSTEM, NO_SYSTEM, PARTS_ALONE]
TEMPLATES = [ChatTemplate(source) for source in SOURCES]


@given(st.sampled_from(TEMPLATES), TURNS)
def test_no_text_is_lost(template: ChatTemplate, turns: list[dict[str, Any]]) -> None:
    text = prompt_text(template, [*turns, USER])
    for turn in turns:
        content = turn["content"] or ""
        for each in [content] if isinstance(content, str) else [part["text"] for part in content]:
            assert each in text
