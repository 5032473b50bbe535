"""Tool calls in chats, requested with OpenAI's client."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai import OpenAI

from server.gateway.tool_formats.table import TOOL_FORMATS
from tests.endpoint.harness import Server, serving
from tests.endpoint.http_client import connected
from tests.endpoint.openai_client import by_seed, client_of
from tests.host.engines import writing
from tests.places import ROOT

USER: Any = {"role": "user", "content": "Hi"}
DEMO = (ROOT / "orca_jax/demo_model/chat_template.jinja").read_text("utf-8")
ARGUMENTS = '{"place": "Rome", "days": 3}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["place", "days"],
}


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("weather", PARAMETERS, description="of a place"), tool("now")]


def said(text: str) -> Any:
    """A server whose model writes this text and then ends, wherever a grammar allows it."""
    data = text.encode() + bytes([0])
    return serving(lambda _, index: data[index] if index < len(data) - 1 else 256, chat_template=DEMO)


def ask(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "test", "messages": [USER], "tools": TOOLS, "max_tokens": 200, **fields}
    )


def streamed(client: OpenAI, **fields: Any) -> list[Any]:
    return list(ask(client, stream=True, **fields))


def put_together(chunks: list[Any]) -> tuple[str, list[list[str]], str]:
    """The content, calls and finish reason of choice 0, as a client assembles them."""
    content, calls, reason = "", list[list[str]](), ""
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index:
                continue
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                if call.index == len(calls):
                    assert call.id.startswith("call_") and call.type == "function"
                    assert call.function.arguments == ""
                    calls.append([call.function.name, ""])
                else:
                    assert (call.id, call.type, call.function.name) == (None, None, None)
                calls[call.index][1] += call.function.arguments
            reason = choice.finish_reason or reason
    return content, calls, reason


@pytest.mark.parametrize(
    ("text", "content", "calls", "reason"),
    [
        (CALL, None, [["weather", ARGUMENTS]], "tool_calls"),
        (f"Let me see.\n{CALL}\n{NOW}", "Let me see.", [["weather", ARGUMENTS], ["now", "{}"]], "tool_calls"),
        ("No tool for that.", "No tool for that.", [], "stop"),
    ],
)
def test_auto_is_text_or_calls(text: str, content: str | None, calls: list[Any], reason: str) -> None:
    with said(text) as server, client_of(server) as client:
        (choice,) = ask(client).choices
        found = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
        assert (choice.message.content, found, choice.finish_reason) == (content, calls, reason)
        chunks = streamed(client)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert put_together(chunks) == (content or "", calls, reason)
        one = ask(client, parallel_tool_calls=False).choices[0]
        assert len(one.message.tool_calls or ()) == min(1, len(calls))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The model would write letters; the engine takes the first allowed token instead."""
    with serving(by_seed, chat_template=DEMO) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "now"}),
        ({"type": "function", "function": {"name": "now"}}, {"now"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "weather"}}],
                },
            },
            {"weather"},
        ),
    ],
)
def test_a_call_is_forced_whatever_the_model_prefers(client: OpenAI, choice: Any, names: set[str]) -> None:
    answer = ask(client, tool_choice=choice, parallel_tool_calls=False).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name in names and answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments["place"] in ("Rome", "Oslo") and 1 <= arguments["days"] <= 9
    else:
        assert arguments == {}
    content, ((name, text),), reason = put_together(
        streamed(client, tool_choice=choice, parallel_tool_calls=False)
    )
    assert (content, name in names, reason) == ("", True, "tool_calls") and isinstance(json.loads(text), dict)


def test_a_call_follows_the_schemas_of_json_schema_generators(client: OpenAI) -> None:
    """Formats, references, 1.0 for 1, a constant object, a record, and a pattern next to a name."""
    parameters = {
        "$defs": {"U": {"enum": ["K"], "format": "u"}},
        "properties": {
            "u": {"$ref": "#/$defs/U"},
            "p": {"const": {"a": 1.0, "b": 0}},
            "m": {"type": "object", "propertyNames": {"type": "string"}, "maxProperties": 0},
        },
        "patternProperties": {"^u$": {"maxLength": 9}},
        "required": ["u", "p", "m"],
        "additionalProperties": False,
    }
    answer = ask(
        client,
        tools=[tool("f", parameters)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=100,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"u": "K", "p": {"a": 1, "b": 0}, "m": {}}


def test_each_of_n_choices_has_its_calls(client: OpenAI) -> None:
    fields: Any = {"tool_choice": "required", "parallel_tool_calls": False, "n": 3}
    choices = ask(client, **fields).choices
    ids = {call.id for choice in choices for call in choice.message.tool_calls}
    assert [choice.index for choice in choices] == [0, 1, 2] and len(ids) == 3
    calls = dict[int, str]()
    for chunk in streamed(client, **fields):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                calls[choice.index] = calls.get(choice.index, "") + call.function.arguments
    assert sorted(calls) == [0, 1, 2] and all(isinstance(json.loads(text), dict) for text in calls.values())


def test_a_call_that_is_cut_off_is_text_and_in_a_stream_ends_with_length() -> None:
    with said(CALL) as server, client_of(server) as client:
        choice = ask(client, max_tokens=50).choices[0]
        assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
        assert choice.message.content == CALL[:50]
        assert put_together(streamed(client, max_tokens=50)) == ("", [["weather", CALL[45:50]]], "length")
        choice = ask(client, stop=["Rome"]).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("stop", CALL.split("Rome")[0])


def test_logprobs_and_usage_count_every_token() -> None:
    with said(CALL) as server, client_of(server) as client:
        choice = ask(client, logprobs=True).choices[0]
        assert "".join(each.token for each in choice.logprobs.content) == CALL
        chunks = streamed(client, logprobs=True, stream_options={"include_usage": True})
        placed = [
            each for chunk in chunks for one in chunk.choices if one.logprobs for each in one.logprobs.content
        ]
        assert "".join(each.token for each in placed) == CALL
        assert chunks[-1].usage.completion_tokens == len(CALL) + 1, "and the end"


def test_response_format_is_for_replies_without_calls() -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"const": True}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "ok", "schema": schema}}
    with said('{"ok": true}') as server, client_of(server) as client:
        assert json.loads(ask(client, response_format=form).choices[0].message.content) == {"ok": True}
    with said(CALL) as server, client_of(server) as client:
        choice = ask(client, response_format=form).choices[0]
        assert choice.message.tool_calls[0].function.arguments == ARGUMENTS
        must = ask(client, response_format=form, tool_choice="required").choices[0]
        assert must.message.tool_calls[0].function.arguments == ARGUMENTS


def test_openais_parse_and_stream_helpers() -> None:
    class Weather(pydantic.BaseModel):
        place: str
        days: int

    weather: Any = openai.pydantic_function_tool(Weather, name="weather")
    with said(CALL) as server, client_of(server) as client:
        answer = client.chat.completions.parse(model="test", messages=[USER], tools=[weather], max_tokens=200)
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == Weather(place="Rome", days=3)
        with client.chat.completions.stream(
            model="test", messages=[USER], tools=[weather], max_tokens=200
        ) as stream:
            kinds = {event.type for event in stream}
            whole = stream.get_final_completion()
        (call,) = whole.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == Weather(place="Rome", days=3)
        assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds


def test_a_conversation_continues_with_the_tools_result() -> None:
    prompts = list[str]()

    def token(request: Any, index: int) -> int:
        prompts.append(bytes(request.prompt_ids).decode())
        return ord("y")

    with serving(token, chat_template=DEMO) as server, client_of(server) as client:
        call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        messages = [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        ]
        assert (
            ask(client, messages=messages, tools=[tool("now")], max_tokens=2).choices[0].message.content
            == "yy"
        )
    assert prompts[0].endswith(f"Hi\n{NOW}\n<tool_response>\nnoon\n</tool_response>")
    assert prompts[0].startswith("<tools>\n")


def test_a_schema_that_no_grammar_can_follow_is_any_object_unless_it_must_be_kept() -> None:
    odd = tool("weather", {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}})
    with said(CALL) as server, client_of(server) as client:
        assert ask(client, tools=[odd]).choices[0].message.tool_calls[0].function.arguments == ARGUMENTS
        strict = tool("weather", odd["function"]["parameters"], strict=True)
        for fields in ({"tools": [strict]}, {"tools": [odd], "tool_choice": "required"}):
            with pytest.raises(openai.BadRequestError, match="tools cannot be followed") as caught:
                ask(client, **fields)
            assert caught.value.param == "tools"


MANY = [tool(f"f{i}") for i in range(129)]
HUGE = tool("f", {"type": "object", "description": "x" * 70_000})


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": MANY}, "tools", "129 tools; 128 are allowed"),
        ({"tools": [HUGE]}, "tools", "65536 are allowed"),
        ({"tools": [tool("a b")]}, "tools.0.function.name", "1 to 128 letters"),
        ({"tools": [tool("a" * 129)]}, "tools.0.function.name", "1 to 128 letters"),
        ({"tools": [tool("a"), tool("a")]}, "tools.1.function.name", "another tool has"),
        ({"tools": [tool("a", {"type": "array"})]}, "tools.0.function.parameters", "schema of an object"),
        ({"tools": [tool("a", paramters={})]}, "tools.0.function.paramters", "did you mean parameters?"),
        ({"tools": [{**tool("a"), "colour": "red"}]}, "tools.0.colour", "not known"),
        ({"tools": [tool("a", strict=1)]}, "tools.0.function.strict", "true or false"),
        ({"tools": [tool("a", {"x-guidance": {}})]}, "tools", "x-guidance"),
        ({"tools": [tool("a", {"properties": 5})], "tool_choice": "required"}, "tools", "cannot be followed"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "without tools"),
        ({"tool_choice": "sometimes"}, "tool_choice", "required"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "nothing"}}},
            "tool_choice.function.name",
            "one of tools",
        ),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function.name", "one of tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
            "at least one",
        ),
        ({"extra_body": {"allowed_token_ids": [5]}}, "allowed_token_ids", "give one of them"),
        ({"extra_body": {"use_beam_search": True}, "temperature": 0}, "tools", "use_beam_search"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_is_refused_by_name(
    client: OpenAI, fields: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    if stream and "use_beam_search" in str(fields):
        return
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        ask(client, stream=stream, **fields)
    assert caught.value.param == param


def test_a_choice_of_none_offers_nothing() -> None:
    with said(CALL) as server, client_of(server) as client:
        choice = ask(client, tool_choice="none", max_tokens=len(CALL)).choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (CALL, None)


def test_without_a_known_format_calls_are_text() -> None:
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with serving(writing(CALL), chat_template=template) as server, client_of(server) as client:
        choice = ask(client, max_tokens=len(CALL)).choices[0]
        assert (choice.message.content, choice.message.tool_calls) == (CALL, None)
        with pytest.raises(openai.BadRequestError, match="--tool-format") as caught:
            ask(client, tool_choice="required")
        assert caught.value.param == "tool_choice"


def test_tools_that_the_template_would_drop_are_refused() -> None:
    with (
        serving(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}") as server,
        client_of(server) as client,
        pytest.raises(openai.BadRequestError, match="does not show") as caught,
    ):
        ask(client)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_call_is_forced_in_every_format(name: str) -> None:
    # Without this channel gpt-oss would think for ever.
    token = writing("<|channel|>commentary ") if name == "gpt_oss" else by_seed
    with serving(token, chat_template=DEMO, tool_format=name) as server, client_of(server) as client:
        fields: Any = {
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "max_tokens": 200,
        }
        (call,) = ask(client, **fields).choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["place"] in ("Rome", "Oslo")
        content, ((called, arguments),), reason = put_together(streamed(client, **fields))
        assert (content, called, reason) == ("", "weather", "tool_calls")
        assert json.loads(arguments)["place"] in ("Rome", "Oslo")


def test_the_schema_of_the_api_knows_tool_choice(server: Server) -> None:
    with connected(server) as client:
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
    assert "tool_calls" in schemas["AnswerMessage"]["properties"]
    assert schemas["ChatChoice"]["properties"]["finish_reason"]["enum"] == ["stop", "length", "tool_calls"]
