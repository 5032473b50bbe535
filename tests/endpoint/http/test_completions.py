"""POST /v1/completions, called with OpenAI's client."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import openai
import pytest
from openai import OpenAI

from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import CONFIG, END, MODEL, Server, serving, until
from tests.endpoint.http_client import connected, error_of
from tests.endpoint.openai_client import by_seed, client_of, letters_by_seed
from tests.host.engines import GatedEngine, PacedEngine, writing


class Seen:
    """An engine's tokens by seed; it records the requests."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}

    def __call__(self, request: Request, index: int) -> int:
        self.requests[request.request_id] = request
        return by_seed(request, index)


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


@pytest.fixture(scope="module")
def server(seen: Seen) -> Iterator[Server]:
    options = EndpointOptions(port=0, grpc_port=None, access_log="off", max_choices=12)
    with serving(seen, options=options) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


# Responses


def test_a_completion_response(client: OpenAI) -> None:
    before = int(time.time())
    answer = client.completions.create(model="test", prompt="abc", seed=0, max_tokens=4)
    assert answer.id.startswith("cmpl-") and len(answer.id) == len("cmpl-") + 32
    assert (answer.object, answer.model) == ("text_completion", "test")
    assert before <= answer.created <= time.time()
    assert answer.system_fingerprint and answer.system_fingerprint.startswith("orca_jax-")
    (choice,) = answer.choices
    # "abc" is 97 + 98 + 99 = 294 = 11 * 26 + 8, and the eighth letter after "a" is "i".
    assert (choice.index, choice.text, choice.finish_reason) == (0, "ijkl", "length")
    assert choice.logprobs is None
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)
    assert answer.usage.total_tokens == 7


def test_response_ids_are_unique(client: OpenAI) -> None:
    one, two = (client.completions.create(model="test", prompt="a", max_tokens=1) for _ in range(2))
    assert one.id != two.id


@pytest.mark.parametrize(
    "prompt, texts",
    [
        ("abc", ["abc"]),
        (["abc"], ["abc"]),
        (["a", "xyz", "a"], ["a", "xyz", "a"]),
        ([97, 98, 99], ["abc"]),
        ([[97, 98, 99], [120]], ["abc", "x"]),
    ],
)
def test_a_prompt_has_four_forms(client: OpenAI, prompt: Any, texts: list[str]) -> None:
    answer = client.completions.create(model="test", prompt=prompt, seed=3, max_tokens=5)
    assert [choice.text for choice in answer.choices] == [
        letters_by_seed(text.encode(), 3, 5) for text in texts
    ]
    assert answer.usage and answer.usage.prompt_tokens == sum(map(len, texts))
    assert answer.usage.completion_tokens == 5 * len(texts)


def test_n_choices_per_prompt_are_in_order_with_consecutive_seeds(client: OpenAI) -> None:
    answer = client.completions.create(model="test", prompt=["ab", "cde"], n=3, seed=10, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    assert [choice.text for choice in answer.choices] == [
        letters_by_seed(prompt, seed, 4) for prompt in (b"ab", b"cde") for seed in (10, 11, 12)
    ]
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 24)


def test_without_a_seed_each_choice_gets_a_random_one(client: OpenAI, seen: Seen) -> None:
    answer = client.completions.create(model="test", prompt="a", n=4, max_tokens=1)
    requests = [seen.requests[f"{answer.id}-{i}"] for i in range(4)]
    assert len({request.seed for request in requests}) == 4


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, SamplingParams(max_tokens=16, temperature=1.0)),
        ({"temperature": None, "max_tokens": None, "n": None, "stop": None}, SamplingParams()),
        ({"temperature": 0, "top_p": 1}, SamplingParams(temperature=0.0)),
        ({"stop": "x"}, SamplingParams(stop=("x",))),
        ({"stop": ["x", "\x00é"]}, SamplingParams(stop=("x", "\x00é"))),
        ({"stop": []}, SamplingParams()),
        (
            {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": -7, "ignore_eos": True, "max_tokens": 3},
            SamplingParams(temperature=0.5, top_p=0.9, top_k=5, seed=-7, ignore_eos=True, max_tokens=3),
        ),
        ({"max_completion_tokens": 3, "max_tokens": 3}, SamplingParams(max_tokens=3)),
    ],
)
def test_parameters_reach_the_engine(
    client: OpenAI, seen: Seen, given: dict[str, Any], expected: SamplingParams
) -> None:
    answer = client.completions.create(model="test", prompt="a", extra_body=given)
    assert seen.requests[f"{answer.id}-0"].sampling == expected


def test_the_model_field_is_optional(server: Server) -> None:
    with connected(server) as http:
        answer = http.post("/v1/completions", json={"prompt": "a\x00b", "user": None, "max_tokens": 1})
    assert answer.status_code == 200
    assert answer.json()["model"] == "test"
    assert answer.json()["usage"]["prompt_tokens"] == 3


def test_end_of_sequence_ends_a_choice_unless_ignored() -> None:
    def ending(request: Request, index: int) -> int:
        return END if index == 2 else ord("x")

    with serving(ending) as server, client_of(server) as client:
        answer = client.completions.create(model="test", prompt="a", max_tokens=5)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("xx", "stop")
        assert answer.usage and answer.usage.completion_tokens == 3
        body = {"ignore_eos": True}
        answer = client.completions.create(model="test", prompt="a", max_tokens=5, extra_body=body)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("xxxx", "length")


def test_a_stop_string_is_cut_off() -> None:
    with serving(writing("In the beginning God created")) as server, client_of(server) as client:
        answer = client.completions.create(model="test", prompt="a", max_tokens=28, stop=["God", "ginn"])
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("In the be", "stop")


# Rejected requests


@pytest.mark.parametrize(
    "fault, param",
    [
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 512}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 512}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 13}, "n"),
        ({"n": 10**400}, "n"),
        ({"n": 5, "prompt": ["a", "b", "c"]}, "n"),
        ({"prompt": ["a"] * 13}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [10**400]}, "prompt"),
        ({"prompt": "a" * 512}, "prompt"),
        ({"prompt": "a" * 100_000}, "prompt"),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": (1 << 63) - 2, "n": 3}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"user": 5}, "user"),
        ({"logit_biass": {}}, "logit_biass"),
        ({"stream": True, "stream_options": {"surprise": 1}}, "stream_options.surprise"),
    ],
)
def test_an_invalid_field_is_rejected_by_name(
    client: OpenAI, server: Server, fault: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="test", prompt="a", extra_body=fault)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert server.gateway.n_live == 0


def test_an_error_names_the_prompt_at_fault(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt 2: the prompt has no token"):
        client.completions.create(model="test", prompt=["a", "b", ""])
    with pytest.raises(openai.BadRequestError, match="prompt 1: token id 300 is not in the vocabulary"):
        client.completions.create(model="test", prompt=[[1], [300]])


@pytest.mark.parametrize("field", ["prompt", "stop", "model", "user"])
def test_a_lone_surrogate_is_a_client_error(server: Server, field: str) -> None:
    body = json.dumps({"prompt": "a", field: "\ud800"})
    assert "\\ud800" in body
    with connected(server) as http:
        answer = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "surrogate" in error_of(answer)["message"]


def test_another_models_name_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-5", prompt="a")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "'test' is served" in caught.value.message


# Errors and limits of the server


def test_all_choices_are_accepted_or_none() -> None:
    engine = GatedEngine()
    config = replace(CONFIG, max_batch_size=1, max_queue=5)
    with serving(engine=engine, config=config) as server, client_of(server) as client:
        one = partial(client.completions.create, model="test", prompt="a", max_tokens=2)
        try:
            with one(stream=True) as running:
                until(lambda: server.service.pool.n_running == 1, "the first request's turn")
                with pytest.raises(openai.BadRequestError, match="may ask for 5 in all"):
                    one(n=6)
                waiting = one(stream=True)
                for stream in (False, True):
                    with pytest.raises(openai.RateLimitError) as caught:
                        one(n=5, stream=stream)
                    assert caught.value.code == "queue_full"
                    assert int(caught.value.response.headers["retry-after"]) >= 1
                    assert server.gateway.n_live == 2, "those that had been taken already have left"
                engine.let(1000)
                for each in (running, waiting):
                    assert "".join(chunk.choices[0].text for chunk in each) == "ab"
        finally:
            engine.let(1000)


def test_a_server_that_is_not_ready_says_so() -> None:
    with serving(ready=False) as server, client_of(server) as client:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model="test", prompt="a", stream=stream)
            assert (caught.value.status_code, caught.value.code) == (503, "not_ready")


def test_a_failed_engine_fails_running_and_later_requests() -> None:
    engine = PacedEngine(seconds=0.005)
    with serving(engine=engine) as server, client_of(server) as client:
        engine.error = RuntimeError("the device is gone")
        for prompt in (["a", "b"], "c"):
            with pytest.raises(openai.InternalServerError, match="the device is gone") as caught:
                client.completions.create(model="test", prompt=prompt)
            assert (caught.value.status_code, caught.value.code) == (503, "engine_failed")
        assert server.gateway.n_live == 0


def test_a_request_ends_at_the_servers_time_limit() -> None:
    options = EndpointOptions(port=0, grpc_port=None, access_log="off", request_timeout=0.1)
    with serving(seconds=0.05, options=options) as server, client_of(server) as client:
        with pytest.raises(openai.InternalServerError, match=r"after 0\.1 seconds") as caught:
            client.completions.create(model="test", prompt="a", max_tokens=400)
        assert (caught.value.status_code, caught.value.code) == (504, "timeout")


def test_a_model_without_a_tokenizer_accepts_and_counts_token_ids() -> None:
    with serving(tokenizer=False) as server, client_of(server) as client:
        answer = client.completions.create(model="test", prompt=[[1, 2], [3]], max_tokens=4)
        assert [choice.text for choice in answer.choices] == ["", ""]
        assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)
        for fault, param in ({"prompt": "a"}, "prompt"), ({"prompt": [1], "stop": "x"}, "stop"):
            with pytest.raises(openai.BadRequestError, match="tokenizer") as caught:
                client.completions.create(model="test", prompt="", extra_body=fault)
            assert caught.value.param == param


def test_a_long_prompt_is_encoded_off_the_loop_to_the_same_tokens() -> None:
    model = replace(MODEL, n_positions=20_000)
    config = replace(CONFIG, n_slots=40_000, max_batch_tokens=20_000)
    text = "abcdefghij" * 1_000
    with serving(by_seed, model=model, config=config) as server, client_of(server) as client:
        answer = client.completions.create(model="test", prompt=text, seed=1, max_tokens=3)
    assert answer.usage and answer.usage.prompt_tokens == 10_000
    assert answer.choices[0].text == letters_by_seed(text.encode(), 1, 3)
