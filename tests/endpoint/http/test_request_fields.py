"""Every field of a generation request is applied, or rejected by name; none is ignored in silence."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx2
import pytest
from anthropic.types.beta import message_count_tokens_params, message_create_params
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel, TypeAdapter, ValidationError

from server.http.fields.conversation import ChatMessage, ContentPart
from server.http.fields.generation import JsonSchema, ResponseFormat, StreamOptions
from server.http.fields.strict import NotBuilt, Strict, hints_of
from server.http.generation.chat import ChatCompletionRequest
from server.http.generation.completions import CompletionRequest
from server.http.messages.fields import CountTokensRequest, MessageRequest
from server.http.responses.fields import ResponseRequest
from tests.endpoint.harness import serving
from tests.endpoint.http_client import connected, error_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx2.Client]:
    with serving() as server, connected(server) as client:
        yield client


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 1, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **fields}


def chat_message(**fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": "a", **fields}])


def content_part(**fields: Any) -> dict[str, Any]:
    return chat_message(content=[{"type": "text", "text": "a", **fields}])


def response_format(**fields: Any) -> dict[str, Any]:
    return completion(response_format={"type": "text", **fields})


def json_schema(**fields: Any) -> dict[str, Any]:
    return response_format(type="json_schema", json_schema={"name": "a", "schema": {}, **fields})


def stream_options(**fields: Any) -> dict[str, Any]:
    return completion(stream=True, stream_options=fields)


class Place(NamedTuple):
    """A place with fields: a route, its model, a body with the fields, and the prefix of their paths."""

    path: str
    model: type[BaseModel]
    body: Any
    prefix: str


PLACES = [
    Place(COMPLETIONS, CompletionRequest, completion, ""),
    Place(COMPLETIONS, StreamOptions, stream_options, "stream_options."),
    Place(COMPLETIONS, ResponseFormat, response_format, "response_format."),
    Place(COMPLETIONS, JsonSchema, json_schema, "response_format.json_schema."),
    Place(CHAT, ChatCompletionRequest, chat, ""),
    Place(CHAT, ChatMessage, chat_message, "messages.0."),
    Place(CHAT, ContentPart, content_part, "messages.0.content.0."),
]


NOT_BUILT = [
    pytest.param(place, name, mark, id=f"{place.path}-{place.prefix}{name}")
    for place in PLACES
    for name, field in place.model.model_fields.items()
    for mark in field.metadata
    if isinstance(mark, NotBuilt)
]
VALUES: list[Any] = [
    True,
    False,
    0,
    1,
    7,
    0.5,
    "x",
    "image_url",
    "function",
    [],
    ["x"],
    [5],
    {},
    {"5": 0.5},
    {"a": "b"},
]


def of_its_type(model: type[BaseModel], name: str) -> list[Any]:
    """The values above that the field's type accepts."""
    adapter = TypeAdapter[Any](model.model_fields[name].annotation or object)
    taken = list[Any]()
    for value in VALUES:
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError:
            continue
        taken.append(value)
    return taken


def same(one: Any, other: Any) -> bool:
    """Equal as JSON: 0 equals 0.0 but not false."""
    return json.dumps(one).removesuffix(".0") == json.dumps(other).removesuffix(".0")


@pytest.mark.parametrize("place, name, mark", NOT_BUILT)
def test_neutral_values_of_unsupported_fields_are_accepted(
    client: httpx2.Client, place: Place, name: str, mark: NotBuilt
) -> None:
    neutral = [*mark.neutral, *([] if place.model.model_fields[name].is_required() else [None])]
    assert neutral
    for value in neutral:
        response = client.post(place.path, json=place.body(**{name: value}))
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("place, name, mark", NOT_BUILT)
def test_unsupported_fields_are_rejected_by_name(
    client: httpx2.Client, place: Place, name: str, mark: NotBuilt
) -> None:
    values = [
        value
        for value in of_its_type(place.model, name)
        if not any(same(value, neutral) for neutral in mark.neutral)
    ]
    assert values or name == "parallel_tool_calls", "no value of its type asks for anything"
    for value in values:
        response = client.post(place.path, json=place.body(**{name: value}))
        assert response.status_code == 400, value
        error = error_of(response)
        assert (error["param"], error["type"]) == (place.prefix + name, "invalid_request_error")
        assert error["message"].startswith(f"{place.prefix}{name} is not built yet; leave it out")
        assert mark.instead is None or error["message"].endswith(mark.instead)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.path}-{place.prefix}")
@pytest.mark.parametrize("value", [1, "x", {"a": 1}, [], False])
def test_an_unknown_field_is_rejected(client: httpx2.Client, place: Place, value: Any) -> None:
    response = client.post(place.path, json=place.body(Temperature=value))
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == f"{place.prefix}Temperature"
    assert "is not known here" in error["message"]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.path}-{place.prefix}")
def test_null_is_accepted_for_any_name(client: httpx2.Client, place: Place) -> None:
    required = {
        field.alias or name for name, field in place.model.model_fields.items() if field.is_required()
    }
    names = {field.alias or name for name, field in place.model.model_fields.items()} - required
    alone = {"json_schema", "stream_options"}  # null changes what the rest of these bodies means
    body = place.body(**dict.fromkeys(["Temperature", "x" * 1000, "é\n", *sorted(names - alone)]))
    if place.model is ChatMessage:
        body["messages"][0]["content"] = "a"
    body["max_tokens"] = 1
    response = client.post(place.path, json=body)
    assert response.status_code == 200, response.text
    assert "x-orca-ignored" not in response.headers


@pytest.mark.parametrize(
    "name, meant",
    [
        ("temprature", "temperature"),
        ("maxTokens", "max_tokens"),
        ("Top_P", "top_p"),
        ("reponse_format", "response_format"),
        ("prompt_cache_keys", "prompt_cache_key"),
        ("colour", None),
        ("temperature" * 1000, None),
    ],
)
def test_a_near_miss_is_suggested(client: httpx2.Client, name: str, meant: str | None) -> None:
    response = client.post(CHAT, json=chat(**{name: 1}))
    error = error_of(response)
    assert (response.status_code, error["param"][:60]) == (400, name[:60])
    advice = "leave it out" if meant is None else f"did you mean {meant}?"
    assert f" is not known here; {advice} (GET /openapi.json" in error["message"]


@pytest.mark.parametrize(
    "params, model",
    [
        (completion_create_params.CompletionCreateParamsNonStreaming, CompletionRequest),
        (chat_create_params.CompletionCreateParamsNonStreaming, ChatCompletionRequest),
        (response_create_params.ResponseCreateParamsNonStreaming, ResponseRequest),
        (message_create_params.MessageCreateParamsNonStreaming, MessageRequest),
        (message_count_tokens_params.MessageCountTokensParams, CountTokensRequest),
    ],
)
def test_every_field_of_the_providers_clients_is_known(params: Any, model: type[Strict]) -> None:
    known = {*model.model_fields, *hints_of(model)}
    assert set(params.__required_keys__ | params.__optional_keys__) <= known


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.path}-{place.prefix}")
def test_any_value_of_any_field_is_applied_or_rejected_by_name(client: httpx2.Client, place: Place) -> None:
    names = sorted(field.alias or name for name, field in place.model.model_fields.items())

    @settings(max_examples=150)
    @given(name=st.sampled_from(names), value=JSON_VALUES)
    def run(name: str, value: Any) -> None:
        response = client.post(place.path, json=place.body(**{name: value}))
        if response.status_code == 200:
            return
        error = error_of(response)
        assert response.status_code == (404 if error["code"] == "model_not_found" else 400), response.text
        path = place.prefix + name
        beside = {"max_tokens": "max_completion_tokens"}.get(path, path)  # they contradict each other
        assert error["param"] is not None
        assert error["param"] in (path, beside) or error["param"].startswith(f"{path}."), response.text

    run()


# Values of a wrong type for every supported field.
WRONG: dict[str, list[Any]] = {
    "model": [1, ["test"]],
    "n": ["1", 1.5, True, [1]],
    "max_tokens": ["1", 1.5, True],
    "max_completion_tokens": ["1", 1.5, True],
    "min_tokens": ["1", 1.5, True],
    "temperature": ["1", True, [0.5]],
    "top_p": ["1", True],
    "top_k": ["1", 1.5, True],
    "min_p": ["1", True],
    "repetition_penalty": ["1", True],
    "frequency_penalty": ["1", True, {}],
    "presence_penalty": ["1", True, []],
    "logit_bias": [1, "x", [], [[5, 1.0]]],
    "seed": ["1", 1.5, True],
    "stop": [1, True, {"a": "b"}],
    "stop_token_ids": [1, "1", {"5": 1}],
    "allowed_token_ids": [1, "1", {"5": 1}],
    "bad_words": [1, "a", {"a": "b"}],
    "ignore_eos": [0, 1, "true"],
    "response_format": [1, "text", ["text"], True],
    "guided_json": [1, True, [{}]],
    "guided_regex": [1, True, ["a"], {}],
    "guided_choice": [1, "a", {"a": "b"}],
    "guided_grammar": [1, True, ["a"], {}],
    "decoder_prompt": [1.5, True, {"a": 1}],
    "return_routed_experts": [0, 1, "true"],
    "return_token_ids": [0, 1, "true"],
    "prompt_logprobs": [1.5, "1", True],
    "use_beam_search": [0, 1, "true"],
    "best_of": ["1", 1.5, True],
    "length_penalty": ["1", True],
    "early_stopping": [1, "sometimes", []],
    "stream": [0, 1, "true"],
    "stream_options": [True, "include_usage", ["include_usage"]],
    "user": [1, {"id": 1}],
    "priority": ["1", 1.5, True],
    "cache_salt": [1, True, ["a"]],
    "kv_transfer_params": [1, "a", ["a"]],
    "prompt": [1, 1.5, True, {"a": 1}, None],
    "echo": [0, 1, "true"],
    "logprobs": ["1", 1.5, []],
    "tool_choice": [5, [], True, {"type": 5}, {"type": "function", "function": "f"}],
    "parallel_tool_calls": [1, "true", []],
    "reasoning_effort": [1, True, [], {}],
    "reasoning": [1, True, [], "high"],
    "messages": ["Hi", {"role": "user", "content": "Hi"}, 5, None],
    "top_logprobs": ["1", 1.5, True],
    "tools": ["x", {"type": "function"}, 5],
    "documents": ["x", {"text": "a"}, 5],
    "add_generation_prompt": [0, 1, "true"],
    "continue_final_message": [0, 1, "true"],
    "add_special_tokens": [0, 1, "true"],
    "chat_template": [1, True, ["default"], {}],
    "chat_template_kwargs": [1, "a=b", ["a"], True],
    "prediction": [1, "a", ["a"], True],
    "speculative": [1, "ngram", True],
}


def test_every_supported_field_is_tried_with_wrong_types() -> None:
    built = {
        name
        for model in (CompletionRequest, ChatCompletionRequest)
        for name, field in model.model_fields.items()
        if not any(isinstance(mark, NotBuilt) for mark in field.metadata)
    }
    assert built == set(WRONG)


@pytest.mark.parametrize(
    "place, name",
    [
        pytest.param(place, name, id=f"{place.path}-{name}")
        for place in (PLACES[0], PLACES[2])
        for name in WRONG
        if name in place.model.model_fields
    ],
)
def test_values_of_a_wrong_type_are_rejected(client: httpx2.Client, place: Place, name: str) -> None:
    for value in WRONG[name]:
        response = client.post(place.path, json=place.body(**{name: value}))
        error = error_of(response)
        assert (response.status_code, error["param"]) == (400, name), value


@pytest.mark.parametrize(
    "path, body, param",
    [
        (COMPLETIONS, completion(stop=["a", 1]), "stop"),
        (COMPLETIONS, completion(prompt=["a", 1]), "prompt"),
        (COMPLETIONS, completion(prompt=[1, "a"]), "prompt"),
        (COMPLETIONS, completion(prompt=[[1], [1.5]]), "prompt"),
        (
            COMPLETIONS,
            completion(stream=True, stream_options={"include_usage": 1}),
            "stream_options.include_usage",
        ),
        (COMPLETIONS, completion(logprobs=1.5), "logprobs"),
        (COMPLETIONS, completion(stop_token_ids=[1, "a"]), "stop_token_ids.1"),
        (COMPLETIONS, completion(allowed_token_ids=[1, True]), "allowed_token_ids.1"),
        (COMPLETIONS, completion(bad_words=["a", None]), "bad_words.1"),
        (COMPLETIONS, completion(guided_choice=["a", 1]), "guided_choice.1"),
        (COMPLETIONS, completion(logit_bias={"5": "1"}), "logit_bias.5"),
        (COMPLETIONS, completion(logit_bias={"x": 1}), "logit_bias"),
        (CHAT, chat(logprobs=1), "logprobs"),
        (CHAT, chat(top_logprobs=3), "top_logprobs"),
        (CHAT, chat(logprobs=False, top_logprobs=3), "top_logprobs"),
        (COMPLETIONS, response_format(type="xml"), "response_format.type"),
        (COMPLETIONS, response_format(type=None), "response_format.type"),
        (COMPLETIONS, completion(response_format={}), "response_format.type"),
        (COMPLETIONS, response_format(type="json_schema"), "response_format.json_schema"),
        (
            COMPLETIONS,
            response_format(json_schema={"name": "a", "schema": {}}),
            "response_format.json_schema",
        ),
        (COMPLETIONS, json_schema(schema=None), "response_format.json_schema.schema"),
        (COMPLETIONS, json_schema(schema={"type": 5}), "response_format.json_schema.schema"),
        (COMPLETIONS, json_schema(schema=True), "response_format.json_schema.schema"),
        (COMPLETIONS, json_schema(name=5), "response_format.json_schema.name"),
        (
            COMPLETIONS,
            response_format(type="json_schema", json_schema={"name": "a"}),
            "response_format.json_schema.schema",
        ),
        (CHAT, chat(messages=[{"role": "user", "content": "a"}, "b"]), "messages.1"),
        (CHAT, chat_message(content=["a"]), "messages.0.content.0"),
        (CHAT, chat_message(name=5), "messages.0.name"),
    ],
)
def test_an_error_names_the_nested_field(
    client: httpx2.Client, path: str, body: dict[str, Any], param: str
) -> None:
    response = client.post(path, json=body)
    assert (response.status_code, error_of(response)["param"]) == (400, param), response.text
