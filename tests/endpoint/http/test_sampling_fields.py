"""Every sampling parameter over HTTP reaches the engine, and is rejected outside its range."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from server.http.generation.chat import ChatCompletionRequest
from server.http.generation.completions import CompletionRequest
from tests.endpoint.harness import Server, serving
from tests.endpoint.http_client import connected, error_of
from tests.host.engines import writing

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MANY = 1 << 30


class Seen:
    """An engine's tokens; it records the latest sampling parameters."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}

    def __call__(self, request: Request, index: int) -> int:
        self.requests[request.request_id] = request
        return writing("abcdefgh")(request, index)

    def of(self, answer: Any) -> list[SamplingParams]:
        return [self.requests[f"{answer['id']}-{choice['index']}"].sampling for choice in answer["choices"]]


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


@pytest.fixture(scope="module")
def server(seen: Seen) -> Iterator[Server]:
    with serving(seen) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx2.Client]:
    with connected(server) as client:
        yield client


def ask(client: httpx2.Client, path: str, **fields: Any) -> httpx2.Response:
    body: dict[str, Any] = {"max_tokens": 4, **fields}
    if path == COMPLETIONS:
        body.setdefault("prompt", "a")
    else:
        body["messages"] = [{"role": "user", "content": "a"}]
    return client.post(path, json=body)


# For each field of SamplingParams: what a client sends, and what the engine receives.
OBJECT = {"type": "object"}
REACHES: dict[str, list[tuple[str, dict[str, Any], Any]]] = {
    "max_tokens": [("", {"max_tokens": 3}, 3), ("", {"max_tokens": None, "max_completion_tokens": 3}, 3)],
    "min_tokens": [("", {"min_tokens": 2}, 2)],
    "temperature": [("", {"temperature": 0}, 0), ("", {"temperature": 0.5}, 0.5)],
    "top_p": [("", {"top_p": 0.5}, 0.5)],
    "top_k": [("", {"top_k": 7}, 7), ("", {"top_k": -1}, 0)],
    "min_p": [("", {"min_p": 0.25}, 0.25)],
    "repetition_penalty": [("", {"repetition_penalty": 1.5}, 1.5)],
    "frequency_penalty": [("", {"frequency_penalty": -2}, -2)],
    "presence_penalty": [("", {"presence_penalty": 2}, 2)],
    "logit_bias": [("", {"logit_bias": {"5": 100, "299": -0.5}}, {5: 100.0, 299: -0.5})],
    "seed": [("", {"seed": -7}, -7)],
    "ignore_eos": [("", {"ignore_eos": True}, True)],
    "stop": [("", {"stop": "x"}, ("x",)), ("", {"stop": ["x", "é"]}, ("x", "é"))],
    "stop_token_ids": [("", {"stop_token_ids": [299, 5, 5]}, (299, 5))],
    "allowed_token_ids": [("", {"allowed_token_ids": [98, 97]}, (98, 97))],
    "bad_words": [("", {"bad_words": ["cd"]}, ("cd",))],
    "logprobs": [
        (COMPLETIONS, {"logprobs": 0}, 0),
        (COMPLETIONS, {"logprobs": 20}, 20),
        (COMPLETIONS, {"logprobs": False}, None),
        (CHAT, {"logprobs": True}, 0),
        (CHAT, {"logprobs": True, "top_logprobs": 20}, 20),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, None),
    ],
    "prompt_logprobs": [
        (COMPLETIONS, {"logprobs": 3, "echo": True}, 3),
        (COMPLETIONS, {"logprobs": 3}, None),
        (COMPLETIONS, {"echo": True}, None),
        (COMPLETIONS, {"logprobs": 3, "echo": True, "prompt_logprobs": 3}, 3),
        ("", {"prompt_logprobs": 0}, 0),
        ("", {"prompt_logprobs": 20}, 20),
    ],
    "guided_json": [
        ("", {"guided_json": OBJECT}, '{"type": "object"}'),
        ("", {"guided_json": '{"type":"object"}'}, '{"type":"object"}'),
        (
            "",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": OBJECT}}},
            '{"type": "object"}',
        ),
    ],
    "guided_json_object": [
        ("", {"response_format": {"type": "json_object"}}, True),
        ("", {"response_format": {"type": "text"}}, False),
    ],
    "guided_regex": [("", {"guided_regex": "[a-z]+"}, "[a-z]+")],
    "guided_choice": [("", {"guided_choice": ["abc", "b"]}, ("abc", "b"))],
    "guided_grammar": [("", {"guided_grammar": 'start: "abc"'}, 'start: "abc"')],
    "speculative": [("", {"speculative": "off"}, "off")],
    "prediction": [
        (CHAT, {"prediction": {"type": "content", "content": "ab"}}, "ab"),
        (CHAT, {"prediction": {"type": "content", "content": [{"type": "text", "text": "é"}] * 2}}, "éé"),
    ],
}


BEAMS = {"use_beam_search": True, "best_of": 3, "length_penalty": 0.5, "early_stopping": "never"}


def test_every_sampling_parameter_has_a_field() -> None:
    """All but `n`, beam search and experts, which have separate tests."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == {"n", *REACHES, *BEAMS, "return_routed_experts"}


@pytest.mark.parametrize(
    "name, path, fields, expected",
    [
        pytest.param(name, each, fields, expected, id=f"{each}-{fields}")
        for name, cases in REACHES.items()
        for path, fields, expected in cases
        for each in ([path] if path else [COMPLETIONS, CHAT])
    ],
)
def test_a_parameter_reaches_the_engine_and_changes_no_other(
    client: httpx2.Client, seen: Seen, name: str, path: str, fields: dict[str, Any], expected: Any
) -> None:
    answer = ask(client, path, **fields)
    assert answer.status_code == 200, answer.text
    (sampling,) = seen.of(answer.json())
    got = dataclasses.asdict(sampling)
    plain = dataclasses.asdict(SamplingParams(max_tokens=4))
    assert got[name] == expected and type(got[name]) in (type(expected), float)
    others = {"logprobs", "prompt_logprobs"} if name in ("logprobs", "prompt_logprobs") else {name}
    assert {n: v for n, v in got.items() if n not in others} == {
        n: v for n, v in plain.items() if n not in others
    }


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_beam_search_is_one_request_with_n_choices(client: httpx2.Client, seen: Seen, path: str) -> None:
    answer = ask(client, path, n=2, **BEAMS)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert choices[0]["score"] > choices[1]["score"]
    assert all(choice["finish_reason"] in ("stop", "length") for choice in choices)
    assert answer.json()["usage"]["completion_tokens"] in range(2, 9)
    request = seen.requests[f"{answer.json()['id']}-0"]
    assert request.sampling == SamplingParams(max_tokens=4, n=2, **BEAMS)


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"stream": True}, "stream"),
        ({"temperature": 0.5}, "temperature"),
        ({"stop": "a"}, "stop"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"guided_regex": "a"}, "guided_regex"),
    ],
)
def test_what_a_beam_search_cannot_have_is_refused_by_name(
    client: httpx2.Client, fields: dict[str, Any], param: str
) -> None:
    answer = ask(client, COMPLETIONS, **{**BEAMS, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_n_becomes_n_requests_with_all_other_parameters(client: httpx2.Client, seen: Seen, path: str) -> None:
    answer = ask(client, path, n=3, seed=5, min_p=0.5, logit_bias={"97": 1})
    assert seen.of(answer.json()) == [
        SamplingParams(max_tokens=4, seed=seed, min_p=0.5, logit_bias={97: 1}) for seed in (5, 6, 7)
    ]


@pytest.mark.parametrize("path, model", [(COMPLETIONS, CompletionRequest), (CHAT, ChatCompletionRequest)])
def test_null_means_the_default_for_every_field(
    client: httpx2.Client, seen: Seen, path: str, model: Any
) -> None:
    nothing = {name: None for name, field in model.model_fields.items() if not field.is_required()}
    answer = ask(client, path, **{**nothing, "max_tokens": 4})
    assert answer.status_code == 200, answer.text
    assert seen.of(answer.json()) == [SamplingParams(max_tokens=4)]


# Values out of range and their error messages, by the field names of completions.
OUTSIDE: dict[str, tuple[list[Any], str]] = {
    "n": ([0, -1, (1 << 16) + 1, 10**400], "from 1 to 65536|may ask for 128 in all"),
    "max_tokens": ([0, -1, MANY + 1, 10**400], "from 1 to 1073741824"),
    "max_completion_tokens": ([0, -1, MANY + 1], "from 1 to 1073741824"),
    "min_tokens": ([-1, 5, MANY + 1, 10**400], "from 0 to 1073741824|at most max_tokens, which is 4"),
    "temperature": ([-0.1, 1e-45, 100.1, 1e300], "must be 0, or a number from 1e-10 to 100"),
    "top_p": ([0, 1e-50, -0.5, 1.01], "from 1e-10 to 1"),
    "top_k": ([-2, MANY + 1, 10**400], "from -1 to 1073741824"),
    "min_p": ([-0.01, 1.01], "from 0 to 1"),
    "repetition_penalty": ([0, 1e-38, 0.0099, -1, 101], "from 0.01 to 100"),
    "frequency_penalty": ([-2.1, 2.1], "from -2 to 2"),
    "presence_penalty": ([-2.1, 2.1], "from -2 to 2"),
    "logit_bias": (
        [
            *({"5": 101}, {"5": -101}, {"-1": 1}, {"x": 1}, {"": 1}, {"5": 1, "05": 1}, {"300": 1}),
            *({"1.5": 1}, {"²": 1}, {str(i): 1 for i in range(4097)}),
        ],
        "from -100 to 100|twice|from 0 to 299",
    ),
    "seed": ([1 << 63, -(1 << 63) - 1, 10**400], "from -9223372036854775808 to 9223372036854775807"),
    "stop": (["", [""], ["x"] * 17, "x" * 1025], "1 to 1024 characters|up to 16 texts"),
    "stop_token_ids": ([[-1], [300], list(range(257))], "from 0|0 to 256"),
    "allowed_token_ids": ([[], [-1], [300], [MANY + 1]], "from 0|1 to 4194304"),
    "bad_words": (
        [[""], ["x" * 1025], ["x"] * 257, ["x" * 33] * 249],
        "1 to 1024 characters|up to 256 texts|has 8217 characters; its texts may have 8192 together",
    ),
    "logprobs": ([-1, 21, 10**400], "from 0 to 20"),
    "prompt_logprobs": ([-1, 21, 10**400], "from 0 to 20"),
    "guided_json": (["", "{", "5", "[]", "x" * 70_000, {"type": "x"}, {"type": 5}], "guided_json"),
    "guided_regex": (["", "(", "x" * 70_000], "guided_regex"),
    "guided_choice": ([[], [""], ["x"] * 1025], "1 to 1024|up to 1024"),
    "guided_grammar": (["", "other: /a/", "x" * 70_000], "guided_grammar"),
    "best_of": ([0, 2, -1, 10**400], "from 1 to 65536|must be 1 or n"),
    "length_penalty": ([-10.1, 11, 2], "from -10 to 10|needs use_beam_search"),
    "early_stopping": ([True, "never"], "needs use_beam_search"),
}
ELSEWHERE = {
    "ignore_eos": "its type is all its range",
    "use_beam_search": "its type is all its range",
    "return_routed_experts": "its type is all its range",
    "guided_json_object": "is a type of response_format",
    "speculative": "its type is all its range",
    "prediction": "is the content of an object",
}


def test_every_sampling_parameter_is_tried_outside_its_range() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names | {"max_completion_tokens"} == {*OUTSIDE, *ELSEWHERE}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_value_out_of_range_is_rejected_with_its_name_and_range(
    client: httpx2.Client, path: str, name: str
) -> None:
    values, message = OUTSIDE[name]
    more: dict[str, Any] = {"max_tokens": None} if name == "max_completion_tokens" else {}
    if (name, path) == ("logprobs", CHAT):
        name, more = "top_logprobs", {"logprobs": True}
    for value in values:
        response = ask(client, path, **{**more, name: value})
        assert response.status_code == 400, f"{value!r:.50}"
        error = error_of(response)
        assert error["param"] == name
        assert name in error["message"] and re.search(message, error["message"]), error["message"]


CHOICE = {"guided_choice": ["a"]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "fields, param, message",
    [
        ({**CHOICE, "guided_regex": "a"}, "guided_choice", "guided_regex and guided_choice are both given"),
        ({**CHOICE, "guided_json": {}}, "guided_choice", "one grammar"),
        ({**CHOICE, "response_format": SCHEMA}, "response_format", "response_format and guided_choice"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "response_format", "one grammar"),
        ({**CHOICE, "allowed_token_ids": [97]}, "allowed_token_ids", "give one of them"),
        (
            {"response_format": SCHEMA, "allowed_token_ids": [97]},
            "allowed_token_ids",
            "allowed_token_ids and response_format.json_schema.schema are both given",
        ),
        (
            {"response_format": {"type": "json_object"}, "allowed_token_ids": [97]},
            "allowed_token_ids",
            "allowed_token_ids and response_format are both given",
        ),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "which is 4"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens", "give one of them"),
        ({"seed": (1 << 63) - 2, "n": 3}, "seed", "to 9223372036854775805"),
    ],
)
def test_contradicting_fields_are_rejected(
    client: httpx2.Client, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    response = ask(client, path, **fields)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param and message in error["message"], error["message"]


def test_response_format_text_is_compatible_with_a_grammar(client: httpx2.Client) -> None:
    answer = ask(client, COMPLETIONS, response_format={"type": "text"}, **CHOICE)
    assert answer.json()["choices"][0]["text"] == "a"


def test_min_tokens_works_without_max_tokens(client: httpx2.Client, seen: Seen) -> None:
    prompt = "<user>a<assistant>"
    longest = 512 - len(prompt)
    assert ask(client, CHAT, max_tokens=None, min_tokens=longest).status_code == 200
    response = ask(client, CHAT, max_tokens=None, min_tokens=longest + 1)
    error = error_of(response)
    assert (error["param"], response.status_code) == ("min_tokens", 400)
    assert f"at most max_tokens, which is {longest}" in error["message"]


def test_a_conversation_that_is_too_long_has_only_that_error(client: httpx2.Client) -> None:
    messages = [{"role": "user", "content": "a" * 600}]
    for least in (0, 5, 600):
        error = error_of(client.post(CHAT, json={"messages": messages, "min_tokens": least}))
        assert error["param"] == ("messages" if least < 512 else "min_tokens"), error


def test_without_a_tokenizer_text_fields_are_rejected_by_name() -> None:
    with serving(tokenizer=False) as server, connected(server) as client:
        for fields, param in (
            ({"bad_words": ["a"]}, "bad_words"),
            ({"guided_regex": "a"}, "guided_regex"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"response_format": SCHEMA}, "response_format.json_schema.schema"),
        ):
            error = error_of(ask(client, COMPLETIONS, prompt=[1], **fields))
            assert (error["param"], error["code"]) == (param, "not_supported")
            assert error["message"].startswith(f"{param} needs a tokenizer")


# The OpenAPI document


def bounds(schema: dict[str, Any]) -> tuple[Any, Any]:
    return schema.get("minimum"), schema.get("maximum")


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest])
def test_the_schema_states_the_ranges_that_are_enforced(model: Any) -> None:
    properties = model.model_json_schema()["properties"]
    ranged = {name: field for name, field in properties.items() if "maximum" in field}
    renamed = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}
    del ranged["priority"]  # tests/endpoint/gateway/test_scheduling_fields.py
    numbers = set(OUTSIDE) & set(properties) - {"logit_bias"}
    assert set(ranged) >= {
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens"),
        *("repetition_penalty", "frequency_penalty", "presence_penalty", "max_completion_tokens"),
    }
    assert set(ranged) <= numbers | {"top_logprobs"}
    for field_name, field in ranged.items():
        name: str = renamed.get(field_name) or field_name

        def params(name: str, value: float) -> SamplingParams:
            given: dict[str, Any] = {"max_tokens": MANY, name: value}
            return SamplingParams(**given)

        low, high = bounds(field)
        if name == "max_tokens" and low == 0:
            low = 1  # 0 is only for echo
        for value in (low, high):
            params(name, value)
        for value in (low - (0.001 if 0 < low < 1 else 1), high + 1):
            with pytest.raises(ValueError, match=name):
                params(name, value)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "bad_words", "guided_choice"])
def test_the_schema_states_the_sizes_of_lists(name: str) -> None:
    field = CompletionRequest.model_json_schema()["properties"][name]
    item: Any = 5 if name.endswith("ids") else "x"

    def params(n: int) -> SamplingParams:
        given: dict[str, Any] = {name: [item] * n}
        return SamplingParams(**given)

    for n in (field["minItems"], min(field["maxItems"], 1 << 16)):
        params(n)
    if field["minItems"]:
        with pytest.raises(ValueError, match=name):
            params(0)
    if field["maxItems"] < 1 << 16:
        with pytest.raises(ValueError, match=name):
            params(field["maxItems"] + 1)


# Effects: this engine obeys a request's constraints


@pytest.mark.parametrize(
    "fields, text, reason",
    [
        ({}, "abcdefgh", "length"),
        ({"allowed_token_ids": [100, 101]}, "ddddeddd", "length"),
        ({"bad_words": ["bc"]}, "ab\x00defgh", "length"),
        ({"stop_token_ids": [99]}, "abc", "stop"),
        ({"stop_token_ids": [99], "min_tokens": 3}, "ab\x00defgh", "length"),
        ({"stop": ["bc"]}, "a", "stop"),
        ({"stop": ["bc"], "min_tokens": 3}, "abcdefgh", "length"),
        ({"guided_choice": ["xyz", "xq"]}, "xq", "stop"),
        ({"guided_regex": "[b-d]{3}"}, "bbc", "stop"),
        ({"guided_grammar": 'start: "<" /[ab]/ ">"'}, "<b>", "stop"),
        ({"guided_json": {"enum": ["x"]}}, '"x"', "stop"),
    ],
)
def test_constraints_are_applied_to_the_output(
    client: httpx2.Client, fields: dict[str, Any], text: str, reason: str
) -> None:
    choice = ask(client, COMPLETIONS, prompt="?", max_tokens=8, **fields).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, reason)


def test_many_long_bad_words_do_not_block_the_loop(client: httpx2.Client) -> None:
    words = [f"{i:03}" + "é" * 29 for i in range(256)]
    assert ask(client, COMPLETIONS, bad_words=words).status_code == 200
