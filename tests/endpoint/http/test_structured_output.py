"""Structured output over HTTP: as OpenAI's client requests it, and its errors."""

import asyncio
import json
import threading
from typing import Any, cast

import httpx2
import openai
import pydantic
import pytest

from orca_jax.errors import QueueFull
from orca_jax.request.output_form import OutputForm
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.service.prepared_params import OutputRules
from server.gateway.gateway import Phase
from server.gateway.served_model import ServedModel
from server.gateway.side_threads import RuleCompiler
from tests.endpoint.harness import Server, serving
from tests.endpoint.http_client import connected, error_of
from tests.endpoint.openai_client import client_of
from tests.host.engines import SOON, orca, simulated, writing

USER: Any = {"role": "user", "content": "Hi"}
GRAMMAR = SamplingParams(guided_regex="a")


class Point(pydantic.BaseModel):
    x: int
    name: str


def test_openais_parse_returns_a_model_instance() -> None:
    text = '{"x":5,"name":"é"}'
    tokens = text.encode()
    with serving(lambda _, index: tokens[index]) as server, client_of(server) as client:
        answer = client.chat.completions.parse(model="test", messages=[USER], response_format=Point)
        assert answer.choices[0].message.parsed == Point(x=5, name="é")
        assert answer.choices[0].finish_reason == "stop"
        with client.chat.completions.stream(
            model="test", messages=[USER], response_format=Point, logprobs=True
        ) as stream:
            whole = stream.get_final_completion()
        assert whole.choices[0].message.parsed == Point(x=5, name="é")
        assert whole.choices[0].logprobs and whole.choices[0].logprobs.content
        assert len(whole.choices[0].logprobs.content) == len(tokens), "the last one is of the text"


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_is_followed_whatever_the_model_prefers(server: Server, strict: bool | None) -> None:
    """This model would generate letters; the engine takes the first allowed token instead."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1]}, "b": {"const": "z"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    wanted: Any = {
        "type": "json_schema",
        "json_schema": {"name": "one", "description": "said", "schema": schema, "strict": strict},
    }
    with client_of(server) as client:
        answer = client.chat.completions.create(model="test", messages=[USER], response_format=wanted)
        completion = client.completions.create(
            model="test", prompt="?", max_tokens=40, extra_body={"response_format": wanted}
        )
    for text in (answer.choices[0].message.content, completion.choices[0].text):
        assert json.loads(text or "") == {"a": 1, "b": "z"}


def test_json_object_allows_any_object() -> None:
    with serving(writing('{"k": [1, null]}')) as server, client_of(server) as client:
        answer = client.chat.completions.create(
            model="test", messages=[USER], response_format={"type": "json_object"}, max_tokens=40
        )
    assert json.loads(answer.choices[0].message.content or "") == {"k": [1, None]}
    assert answer.choices[0].finish_reason == "stop"


@pytest.fixture(scope="module")
def server() -> Any:
    with serving(writing("abcdefgh")) as server:
        yield server


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"guided_json": {"type": "thing"}}, "guided_json"),
        ({"guided_json": '{"type": "thing"}'}, "guided_json"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_grammar": "no grammar"}, "guided_grammar"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 5}}}},
            "response_format.json_schema.schema",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_invalid_grammar_is_rejected_by_field_before_anything_runs(
    server: Server, fields: dict[str, Any], param: str, stream: bool
) -> None:
    n_before = len(server.service.timeline.requests)
    with connected(server) as client:
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [USER]}),
        ):
            response = client.post(path, json={**body, **fields, "stream": stream})
            error = error_of(response)
            assert (response.status_code, error["param"]) == (400, param)
            assert error["type"] == "invalid_request_error" and error["message"].startswith(param)
    assert len(server.service.timeline.requests) == n_before


# Schemas that were once refused, or failed in the middle of an output, each with all of its outputs.
PATTERN = {
    "type": "object",
    "properties": {"a": {"const": 1}},
    "required": ["a"],
    "additionalProperties": False,
    "patternProperties": {"^a$": {"type": "integer"}},
}
TAKEN: list[tuple[Any, list[Any]]] = [
    ({"type": "string", "format": "password", "maxLength": 0}, [""]),
    ({"type": "integer", "enum": [1.0, 2.5]}, [1]),
    ({"const": {"k": 1.0, "l": [2]}}, [{"k": 1, "l": [2]}]),
    (PATTERN, [{"a": 1}]),
    ({"type": "string", "pattern": "^[\\p{Nl}&&]$", "enum": ["Ⅷ", "x"]}, ["Ⅷ"]),
    ({"oneOf": [{"const": 1}, {"const": 2}]}, [1, 2]),
]
JSON = {"type": "json_schema", "name": "n"}


@pytest.mark.parametrize("schema, outputs", TAKEN)
def test_a_schema_is_followed_at_every_door(server: Server, schema: Any, outputs: list[Any]) -> None:
    wrapped = {
        **{"type": "object", "properties": {"v": schema}, "required": ["v"]},
        "additionalProperties": False,
    }
    bodies: dict[str, Any] = {
        "/v1/completions": {"prompt": "?", "max_tokens": 60, "guided_json": wrapped},
        "/v1/chat/completions": {
            "messages": [USER],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": wrapped}},
        },
        "/v1/responses": {"input": "?", "text": {"format": {**JSON, "schema": wrapped}}, "store": False},
        "/v1/messages": {
            "messages": [USER],
            "max_tokens": 60,
            "output_config": {"format": {"type": "json_schema", "schema": wrapped}},
        },
    }
    find = {
        "/v1/completions": lambda answer: answer["choices"][0]["text"],
        "/v1/chat/completions": lambda answer: answer["choices"][0]["message"]["content"],
        "/v1/responses": lambda answer: answer["output"][0]["content"][0]["text"],
        "/v1/messages": lambda answer: answer["content"][0]["text"],
    }
    with connected(server) as client:
        for path, body in bodies.items():
            response = client.post(
                path, json={"model": "test", **body}, headers={"anthropic-version": "2023-06-01"}
            )
            assert response.status_code == 200, (path, response.text)
            assert json.loads(find[path](response.json()))["v"] in outputs, path


def test_a_grammar_that_exceeds_its_limits_ends_its_request_alone_with_a_400() -> None:
    """The grammar is the client's mistake: a retry, as after a 500, would fail again."""
    with serving(writing("a")) as server, connected(server) as client:
        body = {"prompt": "?", "max_tokens": 100, "guided_regex": "(a{1,1000}){1,1000}"}
        response = client.post("/v1/completions", json=body)
        error = error_of(response)
        assert (response.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["code"] == "grammar_exhausted" and "too many expressions" in error["message"]
        streamed = client.post("/v1/completions", json={**body, "stream": True})
        *_, last = [line for line in streamed.text.splitlines() if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "grammar_exhausted"
        message = {"messages": [USER], "max_tokens": 100, "guided_regex": body["guided_regex"]}
        assert client.post("/v1/chat/completions", json=message).status_code == 400
        assert client.post("/v1/completions", json={"prompt": "?", "max_tokens": 4}).status_code == 200
        assert server.service.failure is None


class Disobedient:
    """An engine that generates "b" whenever there is a grammar, whatever the grammar allows."""

    def __call__(self, request: Request, index: int) -> int:
        return ord("b") if request.sampling.grammar else ord("a")


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_output_fails_alone(stream: bool) -> None:
    with serving(engine=simulated(Disobedient())) as server, client_of(server) as client:
        ask: Any = {"model": "test", "prompt": "?", "max_tokens": 4}
        extra = {"guided_regex": "a+", "logprobs": 1}

        def whole() -> list[Any]:
            return list(cast(Any, client.completions.create(**ask, stream=stream, extra_body=extra)))

        with pytest.raises(openai.APIError, match="this output failed") as caught:
            whole()
        assert (caught.value.type, caught.value.code) == ("server_error", "output_failed")
        if not stream:
            assert isinstance(caught.value, openai.InternalServerError) and caught.value.status_code == 500
        assert client.completions.create(**ask).choices[0].text == "aaaa"
        assert server.gateway.phase is Phase.READY and server.service.failure is None
        assert [record.finish_reason for record in server.service.timeline.requests] == [
            FinishReason.ERROR,
            FinishReason.LENGTH,
        ]


class HeldModel:
    """A served model whose service compiles rules only when the test lets it."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.service = self
        self.threads = set[str]()

    def rules(self, sampling: SamplingParams, *_: OutputForm | None) -> OutputRules:
        if sampling.grammar is not None:
            self.threads.add(threading.current_thread().name)
            assert self.gate.wait(SOON)
        return orca(simulated()).rules(SamplingParams())


def test_grammars_compile_off_the_loop_and_too_many_are_rejected() -> None:
    model = HeldModel()
    served = cast(ServedModel, model)

    async def main() -> None:
        compiler = RuleCompiler()
        waiting = [asyncio.create_task(compiler.rules(served, GRAMMAR)) for _ in range(16)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="16 grammars wait, the limit"):
            await compiler.rules(served, GRAMMAR)
        await compiler.rules(served, SamplingParams())  # has no grammar, so it does not wait
        assert await asyncio.to_thread(lambda: "this") == "this", "other work has threads of its own"
        assert not any(each.done() for each in waiting)
        model.gate.set()
        async with asyncio.timeout(SOON):
            await asyncio.gather(*waiting)
            await compiler.rules(served, GRAMMAR)

    asyncio.run(main())
    assert 1 <= len(model.threads) <= 4


def test_a_full_compiler_is_429_with_retry_after(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> OutputRules:
        raise QueueFull("16 grammars wait, the limit; try again later")

    monkeypatch.setattr(server.gateway.compiler, "rules", full)
    with connected(server) as client:
        response: httpx2.Response = client.post("/v1/completions", json={"prompt": "a", "guided_regex": "a"})
    assert (response.status_code, error_of(response)["code"]) == (429, "queue_full")
    assert int(response.headers["retry-after"]) >= 1
