"""Schemathesis sends requests drawn from the server's OpenAPI document: none breaks it or leaks."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from schemathesis import APIOperation, BaseSchema, Case, GenerationMode
from schemathesis.checks import CheckFunction, not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from orca_jax.config import SchedulingConfig
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import CONFIG, Server, serving, until

CALL_SECONDS = 20.0  # a limit per call; without a device a whole test takes little longer
N_LEAST = 2_000
CHECKS: list[CheckFunction] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    allow_header_conformance,
    unsupported_method,
]
TEMPLATES = ("chat_template", "chat_template_kwargs", "continue_final_message")
GENERATING = ("/v1/completions", "/v1/chat/completions")
OTHER_PROTOCOLS = ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
TOKENS = ("/tokenize", "/detokenize")
RELEVANCE = ("/v1/embeddings", "/v1/score", "/v1/rerank")
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE

generated = settings(
    phases=[Phase.generate],  # a failure prints a short curl command instead
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


@pytest.fixture
def server() -> Iterator[Server]:
    """A server; on exit it waits until nothing is left in the pool, the gateway or on the event loop."""
    options = EndpointOptions(
        port=0, grpc_port=None, access_log="off", max_choices=16, max_body_bytes=1 << 20, pages=False
    )
    # With this policy any priority is valid.
    config = replace(CONFIG, scheduling=SchedulingConfig(scheduling_policy="priority"))
    with serving(options=options, config=config) as server:
        yield server


class Calls:
    """Sends cases, checks the responses, and counts both."""

    def __init__(self, server: Server, n_operations: int = 19) -> None:
        self.schema: BaseSchema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        results = list(self.schema.get_all_operations())
        self.operations = [result.ok() for result in results if isinstance(result, Ok)]
        assert len(self.operations) == len(results) == n_operations, "the document has errors"
        self.answers = Counter[tuple[str, int]]()

    @property
    def n(self) -> int:
        return self.answers.total()

    def n_to(self, path: str) -> int:
        """The number of answers of this path, whatever their status."""
        return sum(n for (at, _), n in self.answers.items() if at == path)

    def all_at(self, path: str) -> list[APIOperation[Any, Any, Any, Any]]:
        return [each for each in self.operations if each.path == path]

    def operation(self, path: str) -> APIOperation[Any, Any, Any, Any]:
        operation, *_ = self.all_at(path)
        return operation

    def send(self, case: Case) -> None:
        response = case.call(timeout=CALL_SECONDS, headers={"Connection": "close"})
        self.answers[case.operation.path, response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    def fuzz(
        self,
        path: str,
        mode: GenerationMode,
        n: int,
        change: Callable[[Case], Case] = lambda case: case,
    ) -> None:
        """Send `n` drawn cases, each transformed by `change`."""
        self.fuzz_operation(self.operation(path), mode, n, change)

    def fuzz_operation(
        self,
        operation: APIOperation[Any, Any, Any, Any],
        mode: GenerationMode,
        n: int,
        change: Callable[[Case], Case] = lambda case: case,
    ) -> None:
        cases = operation.as_strategy(generation_mode=mode).map(change)

        @settings(generated, max_examples=n)
        @given(case=cases)
        def run(case: Case) -> None:
            self.send(case)

        run()

    def cover(self) -> None:
        """Send cases that cover every operation: each field's limits, and methods that do not exist."""
        for operation in self.operations:
            config = self.schema.config.generation_for(operation=operation)
            for case in self.schema.iter_coverage_cases(
                operation, generation_modes=[POSITIVE, NEGATIVE], generation_config=config
            ):
                self.send(case)


def runnable(prompt: Any) -> Any:
    """A prompt of the same type that is neither empty nor too long nor out of the vocabulary."""
    if isinstance(prompt, list):
        return [runnable(each) for each in prompt[:5]] or [1]
    return prompt or "a" if isinstance(prompt, str) else int(abs(prompt)) % 256


GRAMMARS: dict[str, list[Any]] = {
    "guided_json": [{"type": "array"}, '{"enum": [5, "x"]}'],
    "guided_regex": ["[a-z]+", "a|bc"],
    "guided_choice": [["yes", "no"]],
    "guided_grammar": ['start: "<" /[a-c]+/ ">"'],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 7}}},
    ],
}


def only_one_grammar(body: dict[str, Any]) -> None:
    """Replace drawn grammars, which are invalid, by a valid one, and drop conflicting token constraints."""
    asked = [name for name in GRAMMARS if body.get(name) is not None]
    for name in asked[1:]:
        del body[name]
    for name in asked[:1]:
        body.pop("allowed_token_ids", None)
        some = GRAMMARS[name]
        body[name] = some[len(repr(body[name])) % len(some)]


def asking_for_little(document: dict[str, Any]) -> Callable[[Case], Case]:
    """Make a generation request valid: without unsupported fields, and not too long."""
    not_built = {
        name
        for schema in document["components"]["schemas"].values()
        for name, field in schema.get("properties", {}).items()
        if field.get("description", "").startswith("Not built yet: leave it out")
    } - {"role", "type", "prompt"}

    def trimmed(value: Any) -> Any:
        if isinstance(value, list):
            return [trimmed(each) for each in value]
        if isinstance(value, dict):
            return {name: trimmed(each) for name, each in value.items() if name not in not_built}
        return value

    def change(case: Case) -> Case:
        body = trimmed(case.body)
        body.pop("model", None)
        for name, most in (("max_tokens", 40), ("max_completion_tokens", 40), ("n", 3)):
            if body.get(name) is not None:
                body[name] = int(abs(body[name])) % most + 1
        if body.get("min_tokens") is not None:
            body["min_tokens"] %= 2
        if not body.get("logprobs"):
            body.pop("top_logprobs", None)
        for name in ("stop_token_ids", "allowed_token_ids"):
            if body.get(name) is not None:
                body[name] = [each % 256 for each in body[name]]
        if body.get("logit_bias") is not None:
            body["logit_bias"] = {str(int(key) % 256): value for key, value in body["logit_bias"].items()}
        only_one_grammar(body)
        if "prompt" in body:
            body["prompt"] = runnable(body["prompt"])
        if "max_tokens" in body:
            body.pop("max_completion_tokens", None)
        if not body.get("stream"):
            body.pop("stream_options", None)
        for name in ("tools", "tool_choice", "reasoning_effort", *TEMPLATES):
            body.pop(name, None)  # what they may hold depends on the chat template
        for message in body.get("messages", []):
            message["role"] = "user"
            for name in ("tool_calls", "tool_call_id"):  # other roles have them
                message.pop(name, None)
            if message.get("content") is None:
                message["content"] = "a"
            for part in message["content"] if isinstance(message["content"], list) else []:
                part["type"] = "text"
        case.body = body
        return case

    return change


@pytest.mark.long
@pytest.mark.timeout(900)
def test_requests_drawn_from_the_openapi_document(server: Server) -> None:
    calls = Calls(server)
    little = asking_for_little(requests.get(f"{server.url}/openapi.json", timeout=CALL_SECONDS).json())
    calls.cover()
    for path in GENERATING:
        calls.fuzz(path, POSITIVE, 100)
        calls.fuzz(path, NEGATIVE, 150)
        calls.fuzz(path, POSITIVE, 300, little)  # most of these run
    for path in OTHER_PROTOCOLS:
        calls.fuzz(path, POSITIVE, 100)
        calls.fuzz(path, NEGATIVE, 60)
    for path in ("/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items"):
        for operation in calls.all_at(path):
            calls.fuzz_operation(operation, POSITIVE, 30)
    for path in RELEVANCE:
        calls.fuzz(path, POSITIVE, 60)
        calls.fuzz(path, NEGATIVE, 40)
    for path in TOKENS:
        calls.fuzz(path, POSITIVE, 200)
        calls.fuzz(path, NEGATIVE, 150)
    calls.fuzz("/v1/models/{model_id}", POSITIVE, 100)
    for path in ("/v1/models", "/health", "/ready", "/version", "/metrics"):
        calls.fuzz(path, POSITIVE, 1)

    assert calls.n >= N_LEAST
    for path in GENERATING:
        assert calls.answers[path, 200] >= 100, "too few requests got as far as the engine"
    until(server.at_rest, "rest")
    counted = 1 + calls.n  # plus the document itself
    assert counted <= n_answered(server) <= counted + 10
    answer = requests.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=CALL_SECONDS)
    assert answer.json()["usage"]["completion_tokens"] == 16


@pytest.mark.long
@pytest.mark.timeout(900)
def test_requests_for_files_and_batches(tmp_path: Path) -> None:
    options = EndpointOptions(port=0, grpc_port=None, access_log="off", batch_dir=tmp_path)
    with serving(options=options) as server:
        calls = Calls(server, 19 + 9 + 2)  # those of batches and of the live view
        calls.operations = [
            one for one in calls.operations if one.path.startswith(("/v1/files", "/v1/batches"))
        ]
        assert len(calls.operations) == 9
        calls.cover()
        calls.fuzz("/v1/batches", POSITIVE, 100)
        calls.fuzz("/v1/batches", NEGATIVE, 100)
        assert calls.answers["/v1/batches", 404] > 0  # of files that there are not
        until(server.at_rest, "rest")


def n_answered(server: Server) -> int:
    """The number of HTTP requests answered, from the server's metrics."""
    text = requests.get(f"{server.url}/metrics", timeout=CALL_SECONDS).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = families["orca_http_requests"].samples
    return int(sum(sample.value for sample in samples if sample.name.endswith("_total")))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["prompt", "messages", "role", "content", "stop", "stream", "n", "tokens", "type"]
            )
            | st.text(st.characters(), max_size=5),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


def as_bytes(value: Any) -> bytes:
    """JSON as Python writes it, with NaN, infinities and lone surrogates."""
    return json.dumps(value).encode("ascii")


@pytest.mark.parametrize("path", [*GENERATING, *OTHER_PROTOCOLS, *TOKENS, *RELEVANCE])
def test_no_body_breaks_the_server(server: Server, path: str) -> None:
    @settings(generated, max_examples=100)
    @given(body=st.binary(max_size=60) | JSON_VALUES.map(as_bytes))
    def run(body: bytes) -> None:
        headers = {"Content-Type": "application/json", "Connection": "close"}
        answer = requests.post(f"{server.url}{path}", body, headers=headers, timeout=CALL_SECONDS)
        assert answer.status_code in (200, 400, 404), answer.text
        assert answer.status_code == 200 or answer.json()["error"]["message"]

    run()
