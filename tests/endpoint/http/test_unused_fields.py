"""Hints, annotations and metadata are accepted, and the header `x-orca-ignored` names them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from pydantic import TypeAdapter

from server.http.admin import Sleep
from server.http.fields.hints import HINTS, Hint
from server.http.fields.strict import MOST_CHARACTERS, NotBuilt, Strict, Unused, hints_of
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import Server, serving
from tests.endpoint.http_client import connected, error_of
from tests.endpoint.tool_replies import TEMPLATE, Replies

HEADER = "x-orca-ignored"
COMPLETIONS, CHAT, RESPONSES, MESSAGES = (
    f"/v1/{name}" for name in ("completions", "chat/completions", "responses", "messages")
)
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CHAT_TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
TOOL: dict[str, Any] = {"type": "function", **FUNCTION}
INPUT_TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
USER: dict[str, Any] = {"role": "user", "content": "a"}
Fields = dict[str, Any]


def chat(*messages: Fields, **fields: Any) -> Fields:
    return {"messages": [*messages] or [USER], "max_tokens": 1, **fields}


def responses(*items: Fields, **fields: Any) -> Fields:
    return {"input": [*items] or [USER], "max_output_tokens": 1, "store": False, **fields}


# Bodies that have all places.
A_CHAT = chat(
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "b"},
    tools=[CHAT_TOOL],
    reasoning={},
    stream=True,
    stream_options={},
)
A_RESPONSE = responses(
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "content": []},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "custom_tool_call", "call_id": "d", "name": "f", "input": "a"},
    {"type": "function_call_output", "call_id": "c", "output": "b"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": "b"},
    tools=[TOOL, {"type": "namespace", "name": "n", "tools": [TOOL]}],
    text={},
    reasoning={},
    stream=True,
    stream_options={},
)
A_MESSAGE = chat(
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "a"},
            {"type": "tool_use", "id": "u", "name": "f", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "u", "content": [{"type": "text", "text": "a"}]}],
    },
    system=[{"type": "text", "text": "a"}],
    tools=[INPUT_TOOL],
    thinking={"type": "adaptive"},
    output_config={},
)
A_COUNT = {name: value for name, value in A_MESSAGE.items() if name != "max_tokens"}
A_COMPLETION = {"prompt": "a", "max_tokens": 1, "stream": True, "stream_options": {}}
TOKENS = {"messages": A_CHAT["messages"], "tools": [CHAT_TOOL]}


class Place(NamedTuple):
    """A place in HINTS, and where it is in a body."""

    path: str
    place: str
    body: Fields
    steps: tuple[str | int, ...] = ()

    @property
    def prefix(self) -> str:
        """The prefix of the place's names in the header."""
        return "".join(f"{step}." for step in self.steps if isinstance(step, str))

    def with_field(self, name: str, value: Any) -> Fields:
        """The body with a field in this place."""
        body: Any = json.loads(json.dumps(self.body))
        inner = body
        for step in self.steps:
            inner = inner[step]
        inner[name] = value
        return body


PLACES = [
    Place(COMPLETIONS, "stream_options", A_COMPLETION, ("stream_options",)),
    Place(CHAT, "/v1/chat/completions", A_CHAT),
    Place(CHAT, "stream_options", A_CHAT, ("stream_options",)),
    Place(CHAT, "reasoning of chat", A_CHAT, ("reasoning",)),
    Place(CHAT, "messages of chat", A_CHAT, ("messages", 0)),
    Place(CHAT, "content parts of chat", A_CHAT, ("messages", 0, "content", 0)),
    Place(CHAT, "tool_calls of chat", A_CHAT, ("messages", 1, "tool_calls", 0)),
    Place(CHAT, "tool_calls.function of chat", A_CHAT, ("messages", 1, "tool_calls", 0, "function")),
    Place(CHAT, "tools of chat", A_CHAT, ("tools", 0)),
    Place(CHAT, "tools of chat", A_CHAT, ("tools", 0, "function")),
    Place("/tokenize", "messages of chat", TOKENS, ("messages", 0)),
    Place("/tokenize", "tools of chat", TOKENS, ("tools", 0)),
    Place(RESPONSES, "/v1/responses", A_RESPONSE),
    Place(RESPONSES, "stream_options", A_RESPONSE, ("stream_options",)),
    Place(RESPONSES, "text", A_RESPONSE, ("text",)),
    Place(RESPONSES, "reasoning", A_RESPONSE, ("reasoning",)),
    *(Place(RESPONSES, "input items", A_RESPONSE, ("input", i)) for i in range(6)),
    *(Place(RESPONSES, "outputs among input items", A_RESPONSE, ("input", i)) for i in (4, 5)),
    Place(RESPONSES, "content parts of responses", A_RESPONSE, ("input", 0, "content", 0)),
    Place(RESPONSES, "tools of responses", A_RESPONSE, ("tools", 0)),
    Place(RESPONSES, "tools of responses", A_RESPONSE, ("tools", 1, "tools", 0)),
    Place(MESSAGES, "/v1/messages", A_MESSAGE),
    Place(f"{MESSAGES}/count_tokens", "/v1/messages", A_COUNT),
    Place(MESSAGES, "blocks of messages", A_MESSAGE, ("messages", 0, "content", 0)),
    Place(MESSAGES, "blocks of messages", A_MESSAGE, ("messages", 1, "content", 0)),
    Place(MESSAGES, "blocks of messages", A_MESSAGE, ("messages", 1, "content", 1)),
    Place(MESSAGES, "blocks of messages", A_MESSAGE, ("messages", 2, "content", 0)),
    Place(MESSAGES, "blocks of messages", A_MESSAGE, ("messages", 2, "content", 0, "content", 0)),
    Place(MESSAGES, "blocks of messages", A_MESSAGE, ("system", 0)),
    Place(MESSAGES, "tools of messages", A_MESSAGE, ("tools", 0)),
    Place(MESSAGES, "thinking", A_MESSAGE, ("thinking",)),
    Place(MESSAGES, "output_config", A_MESSAGE, ("output_config",)),
]
VALUES: list[Any] = ["x", 7, {"type": "x", "ttl": "1h"}, ["x"], True]
CASES = [
    pytest.param(place, name, hint, id=f"{place.path}-{'.'.join(map(str, place.steps))}-{name}")
    for place in PLACES
    for name, hint in HINTS[place.place].items()
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Replies("<think>a</think>b"), chat_template=TEMPLATE) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx2.Client]:
    with connected(server) as client:
        yield client


@pytest.fixture(scope="module")
def strict() -> Iterator[httpx2.Client]:
    options = EndpointOptions(port=0, grpc_port=0, access_log="off", strict=True)
    with (
        serving(Replies("<think>a</think>b"), chat_template=TEMPLATE, options=options) as server,
        connected(server) as client,
    ):
        yield client


@pytest.mark.parametrize("place, name, hint", CASES)
def test_a_hint_is_accepted_and_named(client: httpx2.Client, place: Place, name: str, hint: Hint) -> None:
    for value in VALUES:
        response = client.post(place.path, json=place.with_field(name, value))
        assert response.status_code == 200, response.text
        assert response.headers[HEADER].split(", ") == [place.prefix + name]
    for value in (None, *hint.neutral):
        response = client.post(place.path, json=place.with_field(name, value))
        assert response.status_code == 200, response.text
        assert HEADER not in response.headers


@pytest.mark.parametrize("place, name, hint", CASES)
def test_with_strict_a_hint_is_refused(strict: httpx2.Client, place: Place, name: str, hint: Hint) -> None:
    response = strict.post(place.path, json=place.with_field(name, "x"))
    assert response.status_code == 400
    error = response.json()["error"]
    assert hint.reason in error["message"] and "--strict" in error["message"]
    path = re.sub(r"\.[0-9]+", "", error["message"].split(" is not used")[0])
    assert path == place.prefix + name
    for value in (None, *hint.neutral):
        response = strict.post(place.path, json=place.with_field(name, value))
        assert response.status_code == 200, response.text


def test_a_chat_template_does_not_see_hints() -> None:
    replies = Replies("b")
    template = "{{ messages | tojson }}{{ tools | tojson }}<tool_call>"
    body = chat({**USER, "annotations": [1], "id": "m", "x": None}, tools=[{**CHAT_TOOL, "index": None}])
    body["tools"][0]["cache_control"] = {"type": "ephemeral"}
    body["tools"][0]["function"] = {**FUNCTION, "description": None, "cache_control": {}}
    with serving(replies, chat_template=template) as server, connected(server) as client:
        assert client.post(CHAT, json=body).status_code == 200
    assert replies.prompt == f"{json.dumps([USER])}{json.dumps([CHAT_TOOL])}<tool_call>"


def test_fields_of_objects_among_texts_are_checked(client: httpx2.Client) -> None:
    body = {"query": "a", "documents": ["a", {"text": "b", "colour": 1}]}
    error = error_of(client.post("/v1/rerank", json=body))
    assert error["param"] == "documents.1.colour" and "is not known here" in error["message"]


def test_effort_and_thinking_are_named_where_no_template_reads_them() -> None:
    with serving() as server, connected(server) as client:
        response = client.post(CHAT, json=chat(reasoning_effort="high"))
        assert (response.status_code, response.headers[HEADER]) == (200, "reasoning_effort")
        response = client.post(CHAT, json=chat(reasoning={"effort": "high"}))
        assert (response.status_code, response.headers[HEADER]) == (200, "reasoning.effort")
        for none in ({"reasoning_effort": "none"}, {"reasoning": {"enabled": False}}):
            assert HEADER not in client.post(CHAT, json=chat(**none)).headers
        body = chat(thinking={"type": "adaptive"}, output_config={"effort": "low"})
        response = client.post(MESSAGES, json=body)
        assert (response.status_code, response.headers[HEADER]) == (200, "thinking, output_config.effort")
        body.pop("max_tokens")
        response = client.post(f"{MESSAGES}/count_tokens", json=body)
        assert (response.status_code, response.headers[HEADER]) == (200, "thinking, output_config.effort")
    options = EndpointOptions(port=0, grpc_port=0, access_log="off", strict=True)
    with serving(options=options) as server, connected(server) as client:
        error = error_of(client.post(CHAT, json=chat(reasoning_effort="high")))
        assert error["param"] == "reasoning_effort" and "does not read it" in error["message"]
    with (
        serving(chat_template="{{ reasoning_effort }}{{ enable_thinking }}") as server,
        connected(server) as client,
    ):
        assert HEADER not in client.post(CHAT, json=chat(reasoning_effort="high")).headers
        assert HEADER not in client.post(MESSAGES, json=chat(thinking={"type": "adaptive"})).headers


@pytest.mark.parametrize("stream", [False, True])
def test_each_name_is_in_the_header_once(client: httpx2.Client, stream: bool) -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}} for _ in range(50)]
    body = chat(
        *[{"role": "user", "content": parts}] * 20, prompt_cache_key="k", user="é\r\nx: y", stream=stream
    )
    response = client.post(MESSAGES, json=body)
    assert response.status_code == 400, "the names of OpenAI's fields are not Anthropic's"
    del body["prompt_cache_key"], body["user"]
    response = client.post(MESSAGES, json=body)
    assert response.status_code == 400, "the prompt is too long"
    body["messages"] = body["messages"][:3]
    response = client.post(MESSAGES, json=body)
    assert (response.status_code, response.headers[HEADER]) == (200, "messages.content.cache_control")
    if stream:
        assert response.headers["content-type"].startswith("text/event-stream")


def test_the_header_is_bounded() -> None:
    unused = Unused()
    for i in range(1000):
        unused.note(f"field_{i}", "a reason")
    header = unused.header()
    assert len(header) <= MOST_CHARACTERS and header.endswith(", ...")
    assert header.startswith("field_0, field_1, ")


def test_include_of_other_data_is_named(client: httpx2.Client, strict: httpx2.Client) -> None:
    for name in HINTS["include"]:
        response = client.post(RESPONSES, json=responses(include=[name, "message.output_text.logprobs"]))
        assert (response.status_code, response.headers[HEADER]) == (200, f"include.{name}")
        assert error_of(strict.post(RESPONSES, json=responses(include=[name])))["param"] == "include"


@pytest.mark.parametrize(
    "path, types, prefix",
    [
        (RESPONSES, "types of tools of responses", "tools."),
        (RESPONSES, "types of input items", "input."),
        (MESSAGES, "types of tools of messages", "tools."),
        (MESSAGES, "types of blocks of messages", "messages.content."),
    ],
)
def test_types_that_are_left_out_are_named(
    client: httpx2.Client, strict: httpx2.Client, path: str, types: str, prefix: str
) -> None:
    def body(kind: str) -> Fields:
        other = {"type": kind, "data": "x"}
        if types == "types of blocks of messages":
            return chat({"role": "user", "content": [other, {"type": "text", "text": "a"}]})
        if types == "types of tools of messages":
            return chat(tools=[other, INPUT_TOOL])
        return responses(tools=[other, TOOL]) if prefix == "tools." else responses(other, USER)

    for kind in HINTS[types]:
        response = client.post(path, json=body(kind))
        assert (response.status_code, response.headers[HEADER]) == (200, f"{prefix}{kind}"), response.text
        assert strict.post(path, json=body(kind)).status_code == 400
    assert client.post(path, json=body("other")).status_code == 400


SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


@pytest.mark.parametrize(
    "path, body",
    [
        (RESPONSES, responses(tools=[{"type": "web_search"}])),
        (RESPONSES, responses(tools=[{"type": "web_search"}, TOOL], tool_choice="required")),
        (MESSAGES, chat(tools=[SEARCH])),
        (MESSAGES, chat(tools=[SEARCH, INPUT_TOOL], tool_choice={"type": "any"})),
        (MESSAGES, chat(tools=[SEARCH, INPUT_TOOL], tool_choice={"type": "tool", "name": "web_search"})),
    ],
)
def test_a_tool_that_the_request_needs_is_not_left_out(
    client: httpx2.Client, path: str, body: Fields
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400 and "tool" in response.json()["error"]["message"]


def models_of(base: type[Strict]) -> set[type[Strict]]:
    return {base}.union(*map(models_of, base.__subclasses__()))


MODELS = sorted(models_of(Strict), key=lambda model: model.__qualname__)


def test_every_place_in_the_table_is_a_models() -> None:
    used = {model.place for model in MODELS} | {model.types for model in MODELS}
    others = {"include", "tools of chat", "custom tools"}  # values and dictionaries, which are no models
    assert used - {None} | others == set(HINTS)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_no_field_is_in_two_tables(model: type[Strict]) -> None:
    assert not set(hints_of(model)) & set(model.model_fields)
    for name, field in model.model_fields.items():
        assert sum(isinstance(mark, NotBuilt) for mark in field.metadata) <= 1, name


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_null_stands_for_the_default_of_any_field(model: type[Strict]) -> None:
    if model.__module__ == Sleep.__module__:
        return  # an operator's routes have no optional fields without a default
    for name, field in model.model_fields.items():
        if not field.is_required() and name not in ("messages", "prompt"):  # /tokenize takes one of these
            taken = TypeAdapter[Any](field.rebuild_annotation()).validate_python(None, strict=True)
            assert taken in (None, field.default), name


DOCS = (Path(__file__).parents[3] / "docs" / "apis.md").read_text()


def test_the_documentation_has_the_tables() -> None:
    for place, hints in HINTS.items():
        for name, hint in hints.items():
            rows = [row for row in DOCS.splitlines() if row.startswith(f"| {place} |") and f"`{name}`" in row]
            assert len(rows) == 1 and rows[0].endswith(f"| {hint.reason} |"), (place, name, hint.reason)
    marks = {
        (field.alias or name, mark.why)
        for model in MODELS
        for name, field in model.model_fields.items()
        for mark in field.metadata
        if isinstance(mark, NotBuilt)
    }
    for name, why in marks:
        assert any(f"`{name}`" in row and row.endswith(f"| {why} |") for row in DOCS.splitlines()), (
            name,
            why,
        )
