"""POST /v1/messages, called with Anthropic's client."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import Anthropic

from orca_jax.config import SchedulingConfig
from server.gateway.gateway import Phase
from server.http.generation import reply_stream
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.anthropic_client import anthropic_of
from tests.endpoint.harness import CONFIG, MODEL, Server, serving, until
from tests.endpoint.http_client import connected
from tests.endpoint.tool_replies import CALL, SCHEMA, TEMPLATE, Replies
from tests.host.engines import SOON, GatedEngine, PacedEngine, writing

HI: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {"name": "weather", "description": "the weather", "input_schema": SCHEMA}
Event = dict[str, Any]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(writing("Hello, world. ")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Anthropic]:
    with anthropic_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def plain(server: Server) -> Iterator[httpx2.Client]:
    with connected(server) as client:
        yield client


def ask(client: Anthropic, messages: Any = HI, **fields: Any) -> Any:
    return client.messages.create(**{"model": "test", "max_tokens": 200, "messages": messages, **fields})


def error_of(response: httpx2.Response) -> tuple[int, str, str]:
    """The status, type and message, after checking the form."""
    body = response.json()
    assert (list(body), body["type"], list(body["error"])) == (
        ["type", "error"],
        "error",
        ["type", "message"],
    )
    assert response.headers["request-id"] == response.headers["x-request-id"]
    return response.status_code, body["error"]["type"], body["error"]["message"]


def test_a_message_has_text_usage_and_stop_reason(client: Anthropic) -> None:
    answer = ask(client, max_tokens=5, system="Be brief.", extra_body={"temperature": 0.5, "top_k": 5})
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "test")
    assert [(block.type, block.text) for block in answer.content] == [("text", "Hello")]
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (len("<system>Be brief.<user>Hi<assistant>"), 5)
    assert (usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (0, 0)


def test_why_a_message_ended(client: Anthropic) -> None:
    answer = ask(client, stop_sequences=["xyz", "wor"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "wor")
    assert answer.content[0].text == "Hello, "
    answer = ask(client, max_tokens=100_000)
    assert answer.stop_reason == "model_context_window_exceeded"
    assert answer.usage.input_tokens + answer.usage.output_tokens == MODEL.n_positions
    with serving(Replies("Yes.")) as server, anthropic_of(server) as other:
        answer = ask(other)
    assert (answer.stop_reason, answer.content[0].text) == ("end_turn", "Yes.")


def test_cached_tokens_are_counted_separately() -> None:
    config = replace(CONFIG, scheduling=SchedulingConfig(prefix_caching=True))
    with serving(Replies("Yes."), config=config) as server, anthropic_of(server) as client:
        long: Any = [{"role": "user", "content": "a" * 64}]
        first, second = ask(client, long).usage, ask(client, long).usage
        assert (first.input_tokens, first.cache_read_input_tokens) == (64 + 17, 0)
        assert second.cache_read_input_tokens >= 64
        assert second.input_tokens + second.cache_read_input_tokens == 64 + 17


TEXTS = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in ("one", "two")]


@pytest.mark.parametrize(
    "messages, fields, prompt",
    [
        (HI, {"system": TEXTS}, "<system>one\ntwo<user>Hi<assistant>"),
        ([{"role": "user", "content": TEXTS}], {}, "<user>one\ntwo<assistant>"),
        ([*HI, *HI], {}, "<user>Hi\nHi<assistant>"),
        (
            [*HI, {"role": "assistant", "content": "Yes"}, *HI],
            {},
            "<user>Hi<assistant>Yes<user>Hi<assistant>",
        ),
    ],
)
def test_the_chat_template_makes_the_prompt(messages: Any, fields: Any, prompt: str) -> None:
    replies = Replies("Yes.")
    with serving(replies) as server, anthropic_of(server) as client:
        answer = ask(client, messages, **fields)
        count = client.messages.count_tokens(model="test", messages=messages, **fields)
    assert replies.prompt == prompt
    assert answer.usage.input_tokens == count.input_tokens == len(prompt)


def test_a_last_message_of_the_assistant_is_continued() -> None:
    replies = Replies(" go.")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    with serving(replies, chat_template=template) as server, anthropic_of(server) as client:
        answer = ask(client, [*HI, {"role": "assistant", "content": "Here we"}])
    assert (replies.prompt, answer.content[0].text) == ("<user>Hi<assistant>Here we", " go.")


def test_a_tool_call_is_a_block_and_its_result_is_read() -> None:
    replies = Replies(f"Let me see. {CALL}")
    with serving(replies, chat_template=TEMPLATE) as server, anthropic_of(server) as client:
        answer = ask(client, tools=[TOOL])
        text, call = answer.content
        assert (text.text, answer.stop_reason) == ("Let me see.", "tool_use")
        assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Paris"})
        assert '"parameters": {"properties": {"city"' in replies.prompt.replace('"type": "object", ', "")
        replies.text = "It rains."
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        turn = {"role": "assistant", "content": answer.content}
        history = [*HI, turn, {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]}]
        assert ask(client, history, tools=[TOOL]).content[0].text == "It rains."
        assert "Let me see.<tool_call>" in replies.prompt and "<tool>rain<user>Well?" in replies.prompt
        history[-1] = {"role": "user", "content": [{**result, "is_error": True}]}
        counted = client.messages.count_tokens(model="test", messages=history, tools=[TOOL])
        assert ask(client, history, tools=[TOOL]).usage.input_tokens == counted.input_tokens
        assert "<tool>Error: rain" in replies.prompt
        ask(client, tools=[TOOL], tool_choice={"type": "none"})
        assert "weather" not in replies.prompt


def test_a_tool_is_forced() -> None:
    served = serving(Replies("No."), chat_template=TEMPLATE, reasoning_format="none")
    schema = {"type": "object", "properties": {"city": {"const": "Rome"}}, "required": ["city"]}
    with served as server, anthropic_of(server) as client:
        for choice in {"type": "any"}, {"type": "tool", "name": "weather"}:
            answer = ask(client, tools=[{**TOOL, "input_schema": schema}], tool_choice=choice)
            assert (answer.content[-1].input, answer.stop_reason) == ({"city": "Rome"}, "tool_use")


def test_reasoning_is_a_thinking_block() -> None:
    replies = Replies("<think>Hm.</think>Yes.")
    with serving(replies, chat_template=TEMPLATE) as server, anthropic_of(server) as client:
        answer = ask(client, thinking={"type": "adaptive"})
        thinking, text = answer.content
        assert (thinking.type, thinking.thinking, text.text) == ("thinking", "Hm.", "Yes.")
        ask(client, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000)
        assert not replies.prompt.endswith("</think>")
        ask(
            client,
            [*HI, {"role": "assistant", "content": answer.content}, *HI],
            thinking={"type": "disabled"},
        )
        assert "<assistant><think>Hm.</think>Yes.<user>" in replies.prompt
        assert replies.prompt.endswith("<think></think>")


def test_the_clients_tool_runner_ends_although_no_thread_is_held() -> None:
    """The client continues a reply, learns that no conversation is kept, and sends the whole conversation."""
    replies = Replies(CALL)

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: where
        """
        replies.text = f"It rains in {city}."
        return "rain"

    with serving(replies, chat_template=TEMPLATE) as server, anthropic_of(server) as client:
        for stream in False, True:
            replies.text = CALL
            runner: Any = client.beta.messages.tool_runner(
                model="test", max_tokens=300, tools=[weather], messages=HI, stream=stream
            )
            last = runner.until_done()
            assert (last.stop_reason, last.content[0].text) == ("end_turn", "It rains in Paris.")
            assert "<user>Hi" in replies.prompt and "<tool>rain" in replies.prompt


def test_a_request_that_continues_a_thread(plain: httpx2.Client) -> None:
    body = {"max_tokens": 5, "messages": HI, "thread": {"type": "create"}}
    response = plain.post("/v1/messages", json=body)
    assert (response.status_code, response.headers["x-orca-ignored"]) == (200, "thread")
    body["thread"] = {"type": "continue", "previous_message_id": response.json()["id"]}
    response = plain.post("/v1/messages", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (404, "not_found_error")
    assert error["details"] == {"error_code": "thread_not_found"}
    assert "send all messages" in error["message"]


def test_output_config_makes_the_reply_follow_a_schema() -> None:
    with serving(Replies('{"x": 5}')) as server, anthropic_of(server) as client:
        schema = {"type": "object", "properties": {"x": {"const": 5}}, "required": ["x"]}
        answer = ask(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(answer.content[0].text) == {"x": 5}


IMAGE = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]
RESULT = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "y"}]}]
REDACTED = {"type": "redacted_thinking", "data": "x"}
USE = {"type": "tool_use", "id": "x", "name": "f", "input": {}}


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"messages": []}, "messages"),
        ({"messages": IMAGE}, "messages.0.content.0.type is not built"),
        ({"messages": RESULT}, "messages.0.content.0.tool_use_id"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages.0.content.0"),
        ({"messages": [*HI, {"role": "assistant", "content": [USE]}]}, "tool_result"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x" * 10_000}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": None}, "max_tokens"),
        ({"top_p": 7.0}, "top_p is 7"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens is 10"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type is not built"),
        ({"tools": [{**TOOL, "name": "?"}]}, "tools.0.name is '?'"),
        ({"tools": [{**TOOL, "input_schema": {"type": "string"}}]}, "tools.0.input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"compaction": {"type": "summarize"}}, "compaction is not built"),
        ({"messages": [{**HI[0], "clear_at": "next_user_message"}]}, "messages.0.clear_at is not built"),
        ({"messages": [{"role": "assistant", "content": [REDACTED]}]}, "nothing that the model reads"),
        ({"container": "c"}, "container is not built"),
        ({"mcp_servers": [{}]}, "mcp_servers is not built"),
        ({"max_token": 5}, "max_token is not known here; did you mean max_tokens?"),
        ({"colour": "red"}, "colour is not known"),
    ],
)
def test_what_is_refused_is_named(plain: httpx2.Client, fields: dict[str, Any], words: str) -> None:
    body = {"model": "test", "max_tokens": 5, "messages": HI, **fields}
    status, kind, message = error_of(plain.post("/v1/messages", json=body))
    assert (status, kind) == (400, "invalid_request_error")
    assert words in message


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"messages": IMAGE}, "messages.0.content.0.type is not built"),
        ({"messages": RESULT}, "messages.0.content.0.tool_use_id"),
        ({"tools": [{**TOOL, "name": "?"}]}, "tools.0.name is '?'"),
        ({"max_tokens": 5}, "max_tokens is not known"),
    ],
)
def test_count_tokens_refuses_the_same(plain: httpx2.Client, fields: dict[str, Any], words: str) -> None:
    response = plain.post("/v1/messages/count_tokens", json={"messages": HI, **fields})
    status, kind, message = error_of(response)
    assert (status, kind) == (400, "invalid_request_error")
    assert words in message


def test_the_clients_error_classes(server: Server, client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as raised:
        ask(client, model="other")
    assert raised.value.type == "not_found_error" and raised.value.request_id
    with pytest.raises(anthropic.BadRequestError):
        client.messages.count_tokens(model="test", messages=[])
    options = EndpointOptions(port=0, grpc_port=None, access_log="off", max_body_bytes=2000)
    with serving(options=options, keys=ApiKeys(["key-number-1"])) as keyed:
        with (
            anthropic_of(keyed, "key-number-9") as other,
            pytest.raises(anthropic.AuthenticationError) as refused,
        ):
            ask(other, max_tokens=1)
        assert refused.value.type == "authentication_error"
        with anthropic_of(keyed, "key-number-1") as other:
            assert ask(other, max_tokens=1).usage.output_tokens == 1
            with pytest.raises(anthropic.ContentTooLargeError) as large:
                ask(other, [{"role": "user", "content": "x" * 3000}])
            assert large.value.response.json()["error"]["type"] == "request_too_large"
        with connected(keyed) as other:
            body = {"max_tokens": 1, "messages": HI}
            assert error_of(other.post("/v1/messages", json=body))[:2] == (401, "authentication_error")
            assert (
                other.post("/v1/completions", headers={"x-api-key": "key-number-1"}, json=body).status_code
                == 401
            )
            bearer = {"Authorization": "Bearer key-number-1"}
            assert other.post("/v1/messages", headers=bearer, json=body).status_code == 200
            both = {**bearer, "x-api-key": "key-number-9"}
            assert other.post("/v1/messages", headers=both, json=body).status_code == 401


def test_a_full_queue() -> None:
    config = replace(CONFIG, max_batch_size=1, max_queue=1)
    body = {"max_tokens": 400, "messages": HI, "stream": True, "ignore_eos": True}
    with (
        serving(seconds=0.1, config=config) as server,
        connected(server) as client,
        anthropic_of(server) as other,
        client.stream("POST", "/v1/messages", json=body) as running,
    ):
        first = running.iter_bytes()  # a stream is closed with its iterator
        assert next(first)
        # The queue must be empty again before the second, or that would be refused.
        until(lambda: server.service.pool.n_running == 1, "a request that runs")
        with client.stream("POST", "/v1/messages", json=body) as waiting:
            second = waiting.iter_bytes()
            assert next(second)
            until(lambda: server.service.pool.n_waiting == 1, "a request that waits")
            with pytest.raises(anthropic.RateLimitError) as raised:
                ask(other, max_tokens=400)
            assert raised.value.response.headers["retry-after"]


def test_a_timeout_ends_the_stream_with_an_error() -> None:
    options = EndpointOptions(port=0, grpc_port=None, access_log="off", request_timeout=0.2)
    body = {"max_tokens": 400, "messages": HI, "stream": True, "ignore_eos": True}
    with serving(seconds=0.02, options=options) as server, connected(server) as client:
        last = events_of(client.post("/v1/messages", json=body).content)[-1]
        assert (last["type"], last["error"]["type"]) == ("error", "timeout_error")
        with anthropic_of(server) as other, pytest.raises(anthropic.GatewayTimeoutError):
            ask(other, max_tokens=400, extra_body={"ignore_eos": True})


def events_of(body: bytes) -> list[Event]:
    events = list[Event]()
    for block in body.decode("ascii").split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


def replayed(events: list[Event]) -> dict[str, Any]:
    """The message that the events make, after checking each against the protocol."""
    events = [event for event in events if event["type"] != "ping"]
    start, *blocks, delta, stop = events
    assert (start["type"], delta["type"], stop) == (
        "message_start",
        "message_delta",
        {"type": "message_stop"},
    )
    message, block, text = start["message"], None, ""
    assert (message["content"], message["stop_reason"]) == ([], None)
    for event in blocks:
        kind, index = event["type"], event["index"]
        assert index == len(message["content"])
        if kind == "content_block_start":
            assert block is None
            block, text = event["content_block"], ""
        elif kind == "content_block_delta":
            assert block is not None
            if event["delta"]["type"] == "signature_delta":
                assert block["type"] == "thinking"
                continue
            assert event["delta"]["type"] == DELTAS[block["type"]]
            (name,) = event["delta"].keys() - {"type"}
            text += event["delta"][name]
        else:
            assert kind == "content_block_stop" and block is not None
            key = {"tool_use": "input"}.get(block["type"], block["type"])
            message["content"].append({**block, key: json.loads(text) if key == "input" else text})
            block = None
    assert block is None
    return {**message, **delta["delta"], "usage": delta["usage"]}


BOTH = f"<think>Hm.</think>Let me see. {CALL}\n{CALL}"


@pytest.mark.parametrize(
    "text, types, fields",
    [
        ("Hello \u2028 wörld", ["text"], {}),
        ("", [], {}),
        ("Hello", ["text"], {"max_tokens": 3}),
        ("Hello", ["text"], {"stop_sequences": ["l"]}),
        ("<think>Hm.</think>Yes.", ["thinking", "text"], {}),
        (BOTH, ["thinking", "text", "tool_use", "tool_use"], {"tools": [TOOL]}),
    ],
)
def test_the_events_add_up_to_the_whole_message(text: str, types: list[str], fields: dict[str, Any]) -> None:
    body = {"max_tokens": 300, "messages": HI, **fields}
    with serving(Replies(text), chat_template=TEMPLATE) as server, connected(server) as client:
        response = client.post("/v1/messages", json={**body, "stream": True})
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        made = replayed(events_of(response.content))
        whole = client.post("/v1/messages", json=body).json()
        with anthropic_of(server) as other, other.messages.stream(model="test", **body) as stream:
            final = stream.get_final_message()
    assert [block["type"] for block in made["content"]] == types
    assert [block.type for block in final.content] == types
    for message in (made, whole):
        message.pop("id")
        usage = message.pop("usage")
        assert usage["output_tokens"] == final.usage.output_tokens
        for block in message["content"]:
            block.pop("id", None)
    assert made == whole
    assert (final.stop_reason, final.stop_sequence) == (made["stop_reason"], made["stop_sequence"])


def test_a_call_that_is_cut_off_is_text() -> None:
    with serving(Replies(BOTH), chat_template=TEMPLATE) as server, connected(server) as client:
        body = {"max_tokens": 80, "messages": HI, "tools": [TOOL]}
        whole = client.post("/v1/messages", json=body).json()
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
    assert whole["stop_reason"] == "max_tokens"


def test_pings_keep_a_silent_stream_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_stream, "PING_SECONDS", 0.02)
    body = {"max_tokens": 3, "messages": HI, "stream": True}
    engine = GatedEngine()
    with (
        serving(engine=engine) as server,
        connected(server) as client,
        client.stream("POST", "/v1/messages", json=body) as stream,
    ):
        chunks, received = stream.iter_bytes(), b""
        while received.count(b"event: ping\n") < 4:
            received += next(chunks)
        engine.let(3)
        received += b"".join(chunks)
    assert replayed(events_of(received))["usage"]["output_tokens"] == 3


def test_an_engine_that_fails_and_a_server_that_is_not_ready() -> None:
    engine = PacedEngine(seconds=0.01)
    body = {"max_tokens": 400, "messages": HI, "ignore_eos": True}
    with serving(engine=engine, ready=False) as server, connected(server) as client:
        response = client.post("/v1/messages", json=body)
        assert error_of(response)[:2] == (503, "overloaded_error")
        assert response.headers["retry-after"] == "5"
        server.call(lambda: server.gateway.open(server.model))
        with client.stream("POST", "/v1/messages", json={**body, "stream": True}) as stream:
            chunks = stream.iter_bytes()
            received = next(chunks)
            engine.error = RuntimeError("the device is lost")
            received += b"".join(chunks)
        last = events_of(received)[-1]
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        assert error_of(client.post("/v1/messages", json=body))[:2] == (503, "api_error")


def test_while_the_server_drains() -> None:
    body = {"max_tokens": 400, "messages": HI, "ignore_eos": True, "stream": True}
    with serving(seconds=0.01) as server, connected(server) as client:
        with client.stream("POST", "/v1/messages", json=body) as stream:
            chunks = stream.iter_bytes()
            received = next(chunks)
            draining = asyncio.run_coroutine_threadsafe(server.gateway.drain(0.2), server.loop)
            until(lambda: server.gateway.phase is Phase.DRAINING, "the phase")
            with connected(server) as other:
                assert error_of(other.post("/v1/messages", json=body))[:2] == (503, "overloaded_error")
            assert draining.result(SOON) == 1
            received += b"".join(chunks)
        assert "shutting down" in events_of(received)[-1]["error"]["message"]


def test_a_client_that_leaves_cancels_its_request() -> None:
    body = {"max_tokens": 400, "messages": HI, "ignore_eos": True, "stream": True}
    with serving(seconds=0.01) as server, connected(server) as client:
        with client.stream("POST", "/v1/messages", json=body) as stream:
            assert next(stream.iter_bytes()).startswith(b"event: message_start\n")
        until(server.at_rest, "rest")


@pytest.mark.parametrize(
    "method, path, content, status, kind",
    [
        ("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
        ("POST", "/v1/messages", b'{"max_tokens": NaN}', 400, "invalid_request_error"),
        ("POST", "/v1/messages", b"[" * 100_000, 413, "request_too_large"),
        ("GET", "/v1/messages", b"", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", b"{}", 404, "not_found_error"),
    ],
)
def test_errors_of_http(
    plain: httpx2.Client, method: str, path: str, content: bytes, status: int, kind: str
) -> None:
    headers = {"Content-Type": "application/json"}
    assert error_of(plain.request(method, path, content=content, headers=headers))[:2] == (status, kind)
