"""POST /v1/responses, called with OpenAI's client."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pydantic
import pytest
from openai import OpenAI

from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import CONFIG, MODEL, Server, serving, until
from tests.endpoint.http_client import connected, error_of
from tests.endpoint.openai_client import by_seed, client_of, letters_by_seed
from tests.endpoint.tool_replies import CALL, SCHEMA, TEMPLATE, Replies
from tests.host.engines import SOON

TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}


class Point(pydantic.BaseModel):
    x: int
    name: str


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(by_seed) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def plain(server: Server) -> Iterator[httpx2.Client]:
    with connected(server) as client:
        yield client


def ask(client: OpenAI, given: Any = "Hi", **fields: Any) -> Any:
    seed = {"extra_body": {"seed": 2}}
    return client.responses.create(
        **{"model": "test", "input": given, "max_output_tokens": 4, **seed, **fields}
    )


def test_a_response_has_text_usage_and_the_requests_fields(client: OpenAI) -> None:
    answer = ask(client, metadata={"who": "me"}, temperature=0.5, top_p=0.9, instructions="Be brief.")
    prompt = b"<system>Be brief.<user>Hi<assistant>"
    assert answer.id.startswith("resp_") and len(answer.id) == len("resp_") + 32
    assert (answer.object, answer.model, answer.status) == ("response", "test", "incomplete")
    assert answer.incomplete_details.reason == "max_output_tokens"
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert answer.output_text == letters_by_seed(prompt, 2, 4)
    assert (answer.metadata, answer.temperature, answer.top_p) == ({"who": "me"}, 0.5, 0.9)
    assert (answer.instructions, answer.max_output_tokens) == ("Be brief.", 4)
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (36, 4, 40)
    assert usage.input_tokens_details.cached_tokens == 0
    assert usage.output_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize(
    "items, prompt",
    [
        ([{"role": "user", "content": "Hi"}], "<user>Hi<assistant>"),
        (
            [
                {"role": "developer", "content": "Be brief."},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"role": "assistant", "content": "Ho"},
                {"role": "user", "content": [{"type": "input_text", "text": text} for text in "ab"]},
            ],
            "<system>Be brief.<user>Hi<assistant>Ho<user>a\nb<assistant>",
        ),
        ([{"role": "user", "content": ""}], "<user><assistant>"),
    ],
)
def test_the_chat_template_renders_the_items(items: list[Any], prompt: str) -> None:
    replies = Replies("Yes.")
    with serving(replies) as server, client_of(server) as client:
        answer = ask(client, items, max_output_tokens=20)
    assert replies.prompt == prompt
    assert (answer.output_text, answer.status, answer.incomplete_details) == ("Yes.", "completed", None)
    assert answer.usage.input_tokens == len(prompt)


def test_a_response_continues_a_stored_one() -> None:
    replies = Replies("Yes.")
    with serving(replies) as server, client_of(server) as client:
        first = ask(client, "One", instructions="Be brief.", max_output_tokens=20)
        second = ask(client, "Two", previous_response_id=first.id, max_output_tokens=20)
        third = ask(client, "Three", previous_response_id=second.id, instructions="New.", max_output_tokens=9)
        assert second.previous_response_id == first.id
        assert replies.prompt == (
            "<system>New.<user>One<assistant>Yes.<user>Two<assistant>Yes.<user>Three<assistant>"
        )
        ask(client, "Other", previous_response_id=first.id, max_output_tokens=20)
        assert replies.prompt == "<user>One<assistant>Yes.<user>Other<assistant>", "a second branch"

        found = client.responses.retrieve(third.id)
        assert found.to_dict() == third.to_dict()
        newest: Any = client.responses.input_items.list(third.id, limit=2)
        texts = [item.content[0].text for item in newest.data]
        assert (texts, newest.has_more) == (["Three", "Yes."], True)
        every: list[Any] = list(client.responses.input_items.list(third.id, limit=2, order="asc"))
        assert [item.content[0].text for item in every] == ["One", "Yes.", "Two", "Yes.", "Three"]

        client.responses.delete(first.id)
        for gone in (
            lambda: client.responses.retrieve(first.id),
            lambda: client.responses.delete(first.id),
            lambda: client.responses.input_items.list(first.id),
            lambda: ask(client, previous_response_id=first.id),
        ):
            with pytest.raises(openai.NotFoundError):
                gone()
        ask(client, "Four", previous_response_id=third.id, max_output_tokens=20)
        assert "<user>One" in replies.prompt, "later responses keep the whole conversation"


def test_store_false_stores_nothing(server: Server, client: OpenAI) -> None:
    answer = ask(client, store=False)
    assert answer.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    assert ask(client).to_dict()["store"] is True


def test_no_key_reads_the_responses_of_another() -> None:
    with serving(by_seed, keys=ApiKeys(["key-number-1", "key-number-2"])) as server:
        first, second = (
            OpenAI(base_url=f"{server.url}/v1", api_key=f"key-number-{i}", max_retries=0, timeout=SOON)
            for i in (1, 2)
        )
        with first, second:
            answer = ask(first)
            assert first.responses.retrieve(answer.id).id == answer.id
            with pytest.raises(openai.NotFoundError):
                second.responses.retrieve(answer.id)
            with pytest.raises(openai.NotFoundError):
                second.responses.delete(answer.id)
            with pytest.raises(openai.NotFoundError) as raised:
                ask(second, previous_response_id=answer.id)
            assert (raised.value.param, raised.value.code) == ("previous_response_id", "response_not_found")
            assert ask(first, previous_response_id=answer.id).status == "incomplete"


def test_a_server_that_stores_none() -> None:
    options = EndpointOptions(port=0, grpc_port=None, access_log="off", max_stored_responses=0)
    with serving(by_seed, options=options) as server, client_of(server) as client:
        assert ask(client).to_dict()["store"] is False
        for fields in {"store": True}, {"previous_response_id": "resp_1"}:
            with pytest.raises(openai.BadRequestError) as raised:
                ask(client, **fields)
            assert raised.value.param == next(iter(fields))


def test_a_conversation_too_large_to_store_is_refused() -> None:
    options = EndpointOptions(port=0, grpc_port=None, access_log="off", max_stored_bytes=1 << 16)
    with serving(by_seed, options=options) as server, client_of(server) as client:
        long = [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 1000}]
        with pytest.raises(openai.BadRequestError) as raised:
            ask(client, long)
        assert raised.value.param == "store" and "set store to false" in raised.value.message


def test_structured_output_and_parse() -> None:
    text = '{"x":5,"name":"é"}'
    tokens = text.encode()
    with serving(lambda _, index: tokens[index]) as server, client_of(server) as client:
        answer = client.responses.parse(model="test", input="Hi", text_format=Point)
        assert answer.output_parsed == Point(x=5, name="é")
        assert answer.status == "completed"
        with client.responses.stream(model="test", input="Hi", text_format=Point) as stream:
            for _ in stream:
                pass
            assert stream.get_final_response().output_parsed == Point(x=5, name="é")
        answer = ask(client, text={"format": {"type": "json_object"}}, max_output_tokens=40)
        assert json.loads(answer.output_text) == {"x": 5, "name": "é"}


def test_a_text_has_log_probabilities() -> None:
    with serving(Replies("é!")) as server, client_of(server) as client:
        include: Any = ["message.output_text.logprobs"]
        answer = ask(client, include=include, top_logprobs=2, max_output_tokens=20)
        (part,) = answer.output[0].content
        assert [token.bytes for token in part.logprobs] == [[0xC3], [0xA9], [ord("!")]]
        assert all(len(token.top_logprobs) == 2 for token in part.logprobs)
        follow = ask(client, "More", previous_response_id=answer.id)
        assert follow.usage.input_tokens == len("<user>Hi<assistant>é!<user>More<assistant>".encode())


def test_tool_calls_and_their_outputs() -> None:
    replies = Replies(CALL)
    with serving(replies, chat_template=TEMPLATE) as server, client_of(server) as client:
        answer = ask(client, "Paris?", tools=[TOOL], max_output_tokens=200)
        (call,) = answer.output
        assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
        assert json.loads(call.arguments) == {"city": "Paris"}
        assert answer.status == "completed"
        assert '"name": "weather"' in replies.prompt

        replies.text = "It rains."
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        answer = ask(client, [output], previous_response_id=answer.id, tools=[TOOL], max_output_tokens=200)
        assert answer.output_text == "It rains."
        assert "<tool>rain" in replies.prompt and '"city": "Paris"' in replies.prompt
        sent_back = [{"role": "user", "content": "Paris?"}, call.model_dump(exclude_none=True), output]
        stateless = ask(client, sent_back, tools=[TOOL], store=False, max_output_tokens=200)
        assert stateless.output_text == "It rains."


def test_a_call_is_forced() -> None:
    """The model would reply with a text; the engine takes what the grammar allows."""
    served = serving(Replies("No."), chat_template=TEMPLATE, reasoning_format="none")
    with served as server, client_of(server) as client:
        choice: Any = {"type": "function", "name": "weather"}
        for forced in ("required", choice):
            schema = {"type": "object", "properties": {"city": {"const": "Rome"}}, "required": ["city"]}
            tool = {**TOOL, "parameters": schema}
            answer = ask(client, tools=[tool], tool_choice=forced, max_output_tokens=300)
            assert json.loads(answer.output[-1].arguments) == {"city": "Rome"}
            assert answer.to_dict()["tool_choice"] == forced


def test_reasoning_is_an_item_before_the_message() -> None:
    replies = Replies("<think>Hm, well.</think>Yes.")
    with serving(replies, chat_template=TEMPLATE) as server, client_of(server) as client:
        answer = ask(client, max_output_tokens=100)
        reasoning, message = answer.output
        assert reasoning.type == "reasoning" and reasoning.summary == []
        assert [part.text for part in reasoning.content] == ["Hm, well."]
        assert (message.content[0].text, answer.output_text) == ("Yes.", "Yes.")
        assert answer.usage.output_tokens_details.reasoning_tokens == len("<think>Hm, well.</think>")
        ask(client, "And?", previous_response_id=answer.id, max_output_tokens=100)
        assert "<think>Hm, well.</think>Yes.<user>And?" in replies.prompt
        ask(client, reasoning={"effort": "none"}, max_output_tokens=100)
        assert replies.prompt.endswith("<think></think>")
        raw = client.responses.with_raw_response.create(
            model="test", input="Hi", max_output_tokens=100, reasoning={"effort": "high", "summary": "auto"}
        )
        assert raw.headers["x-orca-ignored"] == "reasoning.summary, reasoning.effort"


LONG: Any = {
    "model": replace(MODEL, n_positions=2048),
    "config": replace(CONFIG, max_batch_tokens=2048),
    "chat_template": TEMPLATE,
}
NAMESPACE: Any = {
    "type": "namespace",
    "name": "files",
    "description": "Tools for files.",
    "tools": [{"type": "function", "name": "read", "description": "Read.", "parameters": SCHEMA}, TOOL],
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_of_a_namespace(stream: bool) -> None:
    replies = Replies(CALL.replace("weather", "files__read"))
    served = serving(replies, **LONG)
    with served as server, client_of(server) as client:
        answer = ask(client, tools=[TOOL, NAMESPACE], max_output_tokens=300, stream=stream)
        if stream:
            *_, ended = answer
            answer = ended.response
        (call,) = answer.output
        assert (call.type, call.name, call.namespace) == ("function_call", "read", "files")
        assert [tool.type for tool in answer.tools] == ["function", "namespace"]
        for text in (
            '"name": "files__read"',
            '"description": "Tools for files.\\n\\nRead."',
            "files__weather",
        ):
            assert text in replies.prompt
        before = replies.prompt.count("Tools for files.")
        assert before == 1, "the model reads what a namespace is for once"

        replies.text = "Done."
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "x"}
        items: Any = [{"role": "user", "content": "Hi"}, call.model_dump(exclude_none=True), output]
        for given, more in ((items, {}), ([output], {"previous_response_id": answer.id})):
            again = ask(client, given, tools=[NAMESPACE], max_output_tokens=300, **more)
            assert again.output_text == "Done."
            assert '<tool_call>{"name": "files__read", "arguments": {"city": "Paris"}}' in replies.prompt


def test_a_function_of_a_namespace_is_forced() -> None:
    schema = {"type": "object", "properties": {"city": {"const": "Rome"}}, "required": ["city"]}
    tools: Any = [TOOL, {**NAMESPACE, "tools": [{**TOOL, "parameters": schema}]}]
    choice: Any = {"type": "function", "name": "weather", "namespace": "files"}
    served = serving(Replies("No."), **LONG, reasoning_format="none")
    with served as server, client_of(server) as client:
        answer = ask(client, tools=tools, tool_choice=choice, max_output_tokens=300)
        call = answer.output[-1]
        assert (call.name, call.namespace, json.loads(call.arguments)) == (
            "weather",
            "files",
            {"city": "Rome"},
        )
        assert answer.to_dict()["tool_choice"] == choice


PATCH: Any = {
    "type": "custom",
    "name": "patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"+'},
}


def test_a_custom_tool() -> None:
    text = 'a "line"\nand é'
    call_text = json.dumps({"name": "patch", "arguments": {"input": text}}, ensure_ascii=False)
    replies = Replies(f"<tool_call>\n{call_text}\n</tool_call>")
    with serving(replies, **LONG) as server, client_of(server) as client:
        answer = ask(client, tools=[PATCH], max_output_tokens=300)
        (call,) = answer.output
        assert (call.type, call.name, call.input, call.status) == (
            "custom_tool_call",
            "patch",
            text,
            "completed",
        )
        assert "Edits files." in replies.prompt and "follows this lark grammar" in replies.prompt
        with client.responses.stream(
            model="test", input="Hi", tools=[PATCH], extra_headers={"x-request-id": "a"}
        ) as stream:
            events = [event for event in stream if "custom_tool_call" in event.type]
            assert stream.get_final_response().output[0].to_dict() | {"id": "", "call_id": ""} == (
                call.to_dict() | {"id": "", "call_id": ""}
            )
        assert [event.type.rsplit(".")[-1] for event in events] == ["delta", "done"]
        assert (events[0].delta, events[1].input) == (text, text)  # pyright: ignore[reportAttributeAccessIssue]

        replies.text = "Done."
        output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
        again = ask(client, [output], previous_response_id=answer.id, tools=[PATCH], max_output_tokens=100)
        assert again.output_text == "Done." and "<tool>ok" in replies.prompt
        assert '"arguments": {"input": "a \\"line\\"\\nand ' in replies.prompt
        sent_back = [{"role": "user", "content": "Hi"}, call.model_dump(exclude_none=True), output]
        assert ask(client, sent_back, tools=[PATCH], max_output_tokens=100).output_text == "Done."
        plain: Any = {**PATCH, "format": {"type": "text"}}
        raw = client.responses.with_raw_response.create(
            model="test", input="Hi", tools=[plain], max_output_tokens=4, tool_choice="auto"
        )
        assert "x-orca-ignored" not in raw.headers
        raw = client.responses.with_raw_response.create(
            model="test", input="Hi", tools=[PATCH], max_output_tokens=4
        )
        assert raw.headers["x-orca-ignored"] == "tools.format"


def test_items_of_a_stored_conversation_are_referred_to() -> None:
    replies = Replies("Yes.")
    with serving(replies) as server, client_of(server) as client:
        first = ask(client, [{"role": "user", "content": "One", "id": "msg_own"}], max_output_tokens=20)
        refers: Any = [{"type": "item_reference", "id": "msg_own"}, {"id": first.output[0].id}]
        second = ask(client, [*refers, {"role": "user", "content": "Two"}], max_output_tokens=20)
        assert replies.prompt == "<user>One<assistant>Yes.<user>Two<assistant>"
        client.responses.delete(first.id)
        ask(client, [*refers, {"role": "user", "content": "Three"}], max_output_tokens=20)
        assert replies.prompt == "<user>One<assistant>Yes.<user>Three<assistant>", "the second has them too"
        listed: list[Any] = list(client.responses.input_items.list(second.id, order="asc"))
        assert [item.id for item in listed[:2]] == ["msg_own", first.output[0].id]
        with pytest.raises(openai.NotFoundError) as raised:
            ask(client, [{"role": "user", "content": "One"}, {"type": "item_reference", "id": "msg_none"}])
        assert (raised.value.param, raised.value.code) == ("input.1.id", "response_not_found")


def test_no_key_refers_to_the_items_of_another() -> None:
    with serving(by_seed, keys=ApiKeys(["key-number-1", "key-number-2"])) as server:
        first, second = (
            OpenAI(base_url=f"{server.url}/v1", api_key=f"key-number-{i}", max_retries=0, timeout=SOON)
            for i in (1, 2)
        )
        with first, second:
            answer = ask(first)
            refers: Any = [
                {"type": "item_reference", "id": answer.output[0].id},
                {"role": "user", "content": "a"},
            ]
            assert ask(first, refers).status == "incomplete"
            with pytest.raises(openai.NotFoundError):
                ask(second, refers)


PART = {"role": "user", "content": [{"type": "input_image", "image_url": "data:..."}]}


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search", "search_context_size": "low"}]}, "tools.0.type"),
        ({"tools": [{**TOOL, "name": ""}]}, "tools.0.name"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tools": [{**TOOL, "parameters": {"type": "string"}}]}, "tools.0.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [PART]}, "input.0.content.0.type"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}, TOOL]}, "tools.0.type"),
        ({"tools": [TOOL, {"type": "web_search"}], "tool_choice": "required"}, "tools.1.type"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{**TOOL, "name": "?"}]}]},
            "tools.0.tools.0.name",
        ),
        ({"tools": [{"type": "web_search"}, TOOL, TOOL]}, "tools.2.name"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input.0.type"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"include": ["reasoning.encrypted"]}, "include"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input.0.call_id"),
        ({"input": [{"role": "tool", "content": ""}]}, "input.0.role"),
        ({"input": "x" * 10_000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 600}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 3}}}},
            "text.format.schema",
        ),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "metadata"),
        ({"stream_options": {}}, "stream_options"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_is_refused_is_named(plain: httpx2.Client, fields: dict[str, Any], param: str) -> None:
    response = plain.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 4, **fields})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param), error
    assert param in error["message"] or param in ("input", "max_output_tokens"), error


@pytest.mark.parametrize(
    "query, param",
    [
        ("?stream=true", "stream"),
        ("?starting_after=3", "starting_after"),
        ("?include=x", "include"),
        ("?other=1", "other"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=x", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=none", "after"),
    ],
)
def test_wrong_query_parameters_are_refused_by_name(
    plain: httpx2.Client, client: OpenAI, query: str, param: str
) -> None:
    response = plain.get(f"/v1/responses/{ask(client).id}{query}")
    assert (response.status_code, error_of(response)["param"]) == (400, param)


def test_a_client_that_leaves_cancels_its_request() -> None:
    with serving(seconds=0.01) as server, connected(server) as client:
        body = {"input": "a", "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/responses", json=body) as stream:
            assert next(stream.iter_bytes()).startswith(b"event: response.created\n")
        until(server.at_rest, "rest")
        assert server.call(lambda: server.gateway.n_live) == 0
