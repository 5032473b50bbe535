"""The events of a streamed response: their order, their numbers, and the whole that they add up to."""

import asyncio
import json
from typing import Any

import httpx2
import pytest

from server.gateway.gateway import Phase
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import Server, serving, until
from tests.endpoint.http_client import connected, error_of
from tests.endpoint.tool_replies import CALL, SCHEMA, TEMPLATE, Replies
from tests.host.engines import SOON, PacedEngine

TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
Event = dict[str, Any]

# What may follow which event, as the protocol documents it; "start" and "end" stand for an item's own events.
AFTER = {
    None: {"created"},
    "created": {"in_progress"},
    "in_progress": {"output_item.added", "completed", "incomplete", "failed"},
    "output_item.added": {
        "content_part.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
    },
    "content_part.added": {
        "output_text.delta",
        "output_text.done",
        "reasoning_text.delta",
        "reasoning_text.done",
    },
    "output_text.delta": {"output_text.delta", "output_text.done"},
    "output_text.done": {"content_part.done"},
    "reasoning_text.delta": {"reasoning_text.delta", "reasoning_text.done"},
    "reasoning_text.done": {"content_part.done"},
    "content_part.done": {"output_item.done"},
    "function_call_arguments.delta": {"function_call_arguments.delta", "function_call_arguments.done"},
    "function_call_arguments.done": {"output_item.done"},
    "output_item.done": {"output_item.added", "completed", "incomplete", "failed"},
    "completed": set[str](),
    "incomplete": set[str](),
    "failed": set[str](),
}


def events_of(body: bytes) -> list[Event]:
    """The events of a stream, whose names are their types."""
    events = list[Event]()
    for block in body.decode("ascii").split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def replayed(events: list[Event]) -> dict[str, Any]:
    """The response that the events make, after checking each against the protocol."""
    state, output = None, list[dict[str, Any]]()
    item: dict[str, Any] = {}
    text, part, logprobs = "", "", list[Any]()
    for number, event in enumerate(events):
        name = event["type"].removeprefix("response.")
        assert event["sequence_number"] == number
        assert name in AFTER[state], f"{name} after {state}"
        state = name
        if "response" in event:
            assert event["response"]["output"] == output
            continue
        assert event["output_index"] == len(output)
        if name == "output_item.added":
            item, text, logprobs = event["item"], "", []
            assert item["status"] == "in_progress"
        elif name == "output_item.done":
            assert (event["item"]["id"], event["item"]["type"]) == (item["id"], item["type"])
            output.append(event["item"])
        else:
            assert event["item_id"] == item["id"]
            assert event.get("content_index", 0) == 0
        if name == "content_part.added":
            part = event["part"]["type"]
            assert (part, event["part"]["text"]) in (("output_text", ""), ("reasoning_text", ""))
        elif name.endswith(".delta"):
            text += event["delta"]
            logprobs += event.get("logprobs", [])
        elif name in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == text and name == f"{part}.done"
            assert event.get("logprobs", []) == logprobs
        elif name == "function_call_arguments.done":
            assert event["arguments"] == text
        elif name == "content_part.done":
            assert (event["part"]["type"], event["part"]["text"]) == (part, text)
    assert not AFTER[state], "the stream ends with the whole response"
    return events[-1]["response"]


def streamed(client: httpx2.Client, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/responses", json={"input": "Hi", "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return replayed(events_of(response.content))


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """The response without the parts that differ from one response to the next."""
    text = json.loads(json.dumps(response))
    for key in ("id", "created_at", "completed_at"):
        del text[key]
    del text["usage"]["input_tokens_details"]
    for item in text["output"]:
        del item["id"]
        item.pop("call_id", None)
    return text


BOTH = f"<think>Hm.</think>Let me see. {CALL}\n{CALL}"


@pytest.mark.parametrize(
    "text, types, fields",
    [
        ("Hello \u2028 wörld", ["message"], {}),
        ("", ["message"], {}),
        ("Hello", ["message"], {"max_output_tokens": 3}),
        ("Hello", ["message"], {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        ("<think>Hm.</think>Yes.", ["reasoning", "message"], {}),
        ("<think>Hm, I", ["reasoning"], {"max_output_tokens": 9}),
        (CALL, ["function_call"], {"tools": [TOOL]}),
        (BOTH, ["reasoning", "message", "function_call", "function_call"], {"tools": [TOOL]}),
        (BOTH, ["reasoning", "message", "function_call"], {"tools": [TOOL], "max_output_tokens": 80}),
    ],
)
def test_the_events_add_up_to_the_whole_response(text: str, types: list[str], fields: dict[str, Any]) -> None:
    with serving(Replies(text), chat_template=TEMPLATE) as server, connected(server) as client:
        made = streamed(client, **fields)
        whole = client.post("/v1/responses", json={"input": "Hi", **fields}).json()
        stored = client.get(f"/v1/responses/{made['id']}").json()
    assert [item["type"] for item in made["output"]] == types
    assert without_ids(made) == without_ids(whole)
    assert stored == made
    cut = "max_output_tokens" in fields
    assert made["status"] == ("incomplete" if cut else "completed")
    assert made["output"][-1]["status"] == made["status"]
    assert made["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)


def test_an_engine_that_fails() -> None:
    engine = PacedEngine(seconds=0.01)
    with serving(engine=engine) as server, connected(server) as client:
        body = {"input": "a", "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/responses", json=body) as stream:
            chunks = stream.iter_bytes()
            received = next(chunks)
            engine.error = RuntimeError("the device is lost")
            received += b"".join(chunks)
        response = replayed(events_of(received))
        assert response["status"] == "failed"
        assert "the device is lost" in response["error"]["message"]
        assert client.get(f"/v1/responses/{response['id']}").status_code == 404
        after = client.post("/v1/responses", json={"input": "a"})
        assert (after.status_code, error_of(after)["code"]) == (503, "engine_failed")


def test_while_the_server_loads_and_drains() -> None:
    with serving(seconds=0.01, ready=False) as server, connected(server) as client:
        loading = client.post("/v1/responses", json={"input": "a"})
        assert (loading.status_code, loading.headers["retry-after"]) == (503, "5")
        assert error_of(loading)["code"] == "not_ready"
        server.call(lambda: server.gateway.open(server.model))
        body = {"input": "a", "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/responses", json=body) as stream:
            chunks = stream.iter_bytes()
            received = next(chunks)
            draining = drain(server)
            with connected(server) as other:
                assert other.post("/v1/responses", json={"input": "a"}).status_code == 503
            assert draining.result(SOON) == 1
            received += b"".join(chunks)
        response = replayed(events_of(received))
        assert "shutting down" in response["error"]["message"]


def drain(server: Server) -> Any:
    draining = asyncio.run_coroutine_threadsafe(server.gateway.drain(0.2), server.loop)
    until(lambda: server.gateway.phase is Phase.DRAINING, "the phase")
    return draining


def test_a_request_that_takes_too_long() -> None:
    options = EndpointOptions(port=0, grpc_port=None, access_log="off", request_timeout=0.1)
    with serving(seconds=0.01, options=options) as server, connected(server) as client:
        body = {"input": "a", "ignore_eos": True}
        late = client.post("/v1/responses", json=body)
        assert (late.status_code, error_of(late)["code"]) == (504, "timeout")
        assert streamed(client, **body)["status"] == "failed"
