"""`priority` and `cache_salt` over both protocols, the isolation of API keys, and counts of cached tokens."""

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
import httpx2
import pytest

from orca_jax.config import SchedulingConfig, ServingConfig
from orca_jax.request.request import Request
from orca_jax.request.scheduling_params import MAX_CACHE_SALT, PRIORITY_RANGE
from orca_jax.scheduling import prefix_lookup
from orca_jax.service.orca import SCHEDULER_THREAD
from server.http.generation.chat import ChatCompletionRequest
from server.http.generation.completions import CompletionRequest
from server.metrics import access_log
from server.rpc import generation_pb2 as pb
from server.rpc.generation_pb2_grpc import GenerationStub
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import CONFIG, Server, serving, until
from tests.endpoint.http_client import error_of
from tests.endpoint.log_lines import Lines
from tests.host.engines import SOON, GatedEngine, counting

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CACHING = replace(CONFIG, scheduling=SchedulingConfig())
BY_PRIORITY = replace(
    CONFIG, max_batch_size=1, scheduling=SchedulingConfig(scheduling_policy="priority", reservation="full")
)
KEYS = ("first-key", "second-key")
PROMPT = "x" * 100  # six full blocks of 16
CACHED = 96


class Arrivals:
    """An engine's tokens, which also list the requests in the order of their first token."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __call__(self, request: Request, index: int) -> int:
        if request not in self.requests:
            self.requests.append(request)
        return counting(request, index)


@contextmanager
def http(server: Server, key: str | None = None) -> Iterator[httpx2.Client]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with httpx2.Client(base_url=server.url, timeout=SOON, headers=headers) as client:
        yield client


@contextmanager
def rpc(server: Server) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc_address) as channel:
        yield GenerationStub(channel)


def metadata(key: str | None) -> Any:
    return None if key is None else [("authorization", f"Bearer {key}")]


def body(path: str, prompt: str = PROMPT, **fields: Any) -> dict[str, Any]:
    said: dict[str, Any] = (
        {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
    )
    return {**said, "max_tokens": 1, **fields}


def cached(server: Server, protocol: str, *, key: str | None = None, **fields: Any) -> int:
    """Ask for PROMPT, and return the number of its cached tokens."""
    if protocol == "grpc":
        with rpc(server) as stub:
            request = pb.GenerateRequest(text=PROMPT, sampling=pb.SamplingParams(max_tokens=1), **fields)
            (answer,) = stub.Generate(request, metadata=metadata(key), timeout=SOON)
            return answer.usage.cached_tokens
    with http(server, key) as client:
        response = client.post(COMPLETIONS, json=body(COMPLETIONS, **fields))
        assert response.status_code == 200, response.text
        return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


# The fields


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_http_fields_reach_the_request(path: str) -> None:
    arrivals = Arrivals()
    given: list[dict[str, Any]] = [
        {},
        {"priority": -7, "cache_salt": "s"},
        {"priority": None, "cache_salt": None},
    ]
    with serving(arrivals, config=BY_PRIORITY) as server, http(server) as client:
        for fields in given:
            assert client.post(path, json=body(path, **fields)).status_code == 200
    arrived = [(request.priority, request.cache_salt) for request in arrivals.requests]
    assert arrived == [(0, ("", "")), (-7, ("", "s")), (0, ("", ""))]


def test_grpc_fields_reach_the_request() -> None:
    arrivals = Arrivals()
    fields: dict[str, Any] = {"text": "a", "sampling": pb.SamplingParams(max_tokens=1)}
    with serving(arrivals, config=BY_PRIORITY) as server, rpc(server) as stub:
        for request in (
            pb.GenerateRequest(**fields, priority=-7, cache_salt="s"),
            pb.GenerateRequest(**fields),
        ):
            list(stub.Generate(request, timeout=SOON))
    arrived = [(request.priority, request.cache_salt) for request in arrivals.requests]
    assert arrived == [(-7, ("", "s")), (0, ("", ""))]


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"priority": PRIORITY_RANGE[1] + 1}, "from -2147483648 to 2147483647"),
    ({"priority": PRIORITY_RANGE[0] - 1}, "from -2147483648 to 2147483647"),
    ({"cache_salt": ""}, "has 0 characters"),
    ({"cache_salt": "x" * (MAX_CACHE_SALT + 1)}, "has 513 characters; it must have 1 to 512"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_invalid_fields_are_rejected_over_http(path: str) -> None:
    with serving(config=BY_PRIORITY) as server, http(server) as client:
        for fields, message in INVALID:
            response = client.post(path, json=body(path, **fields))
            error = error_of(response)
            assert (response.status_code, error["param"]) == (400, next(iter(fields)))
            assert message in error["message"]


def test_invalid_salts_are_rejected_over_grpc() -> None:
    with serving(config=BY_PRIORITY) as server, rpc(server) as stub:
        for fields, message in INVALID[2:]:
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(pb.GenerateRequest(text="a", **fields), timeout=SOON))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert message in str(caught.value.details())
            assert ("orca-param", "cache_salt") in caught.value.trailing_metadata()


@pytest.mark.parametrize("order", ["fcfs", "fair"])
def test_a_priority_is_rejected_where_it_would_have_no_effect(order: Any) -> None:
    config = replace(CONFIG, scheduling=SchedulingConfig(scheduling_policy=order))
    text = (
        f"priority is 1, but the engine's scheduling policy is '{order}'; leave priority out, or start the "
    )
    with serving(config=config) as server, http(server) as client, rpc(server) as stub:
        for path in (COMPLETIONS, CHAT):
            assert client.post(path, json=body(path, priority=0)).status_code == 200
            response = client.post(path, json=body(path, priority=1))
            assert (response.status_code, error_of(response)["param"]) == (400, "priority")
            assert error_of(response)["message"].startswith(text)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(pb.GenerateRequest(text="a", priority=1), timeout=SOON))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(caught.value.details()).startswith(text)


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest])
def test_the_schema_states_the_ranges(model: Any) -> None:
    properties = model.model_json_schema()["properties"]
    priority, salt = properties["priority"], properties["cache_salt"]
    assert (priority["minimum"], priority["maximum"]) == PRIORITY_RANGE
    assert (salt["minLength"], salt["maxLength"]) == (1, MAX_CACHE_SALT)


def test_lower_priorities_go_first_over_both_protocols() -> None:
    arrivals = Arrivals()
    engine = GatedEngine(arrivals)
    threads: list[threading.Thread] = []

    def ask(server: Server, prompt: str, priority: int) -> None:
        if prompt == "d":
            with rpc(server) as stub:
                sampling = pb.SamplingParams(max_tokens=1)
                list(stub.Generate(pb.GenerateRequest(text="d", priority=priority, sampling=sampling)))
        else:
            with http(server) as client:
                client.post(COMPLETIONS, json=body(COMPLETIONS, prompt, priority=priority))

    with serving(engine=engine, config=BY_PRIORITY) as server:
        try:
            for i, (prompt, priority) in enumerate((("a", 0), ("b", 5), ("c", 0), ("d", -5))):
                threads.append(threading.Thread(target=ask, args=(server, prompt, priority)))
                threads[-1].start()
                until(lambda n=i + 1: len(server.service.pool) == n, "the request")
                assert engine.waited_for.wait(SOON)  # the first one runs
        finally:
            engine.let(1000)
            for thread in threads:
                thread.join(SOON)
    assert [chr(request.prompt_ids[0]) for request in arrivals.requests] == list("adcb")


# Isolation


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_without_keys_all_share_except_with_a_salt(protocol: str) -> None:
    with serving(config=CACHING) as server:
        assert cached(server, "http") == 0
        assert cached(server, protocol) == CACHED
        assert cached(server, protocol, cache_salt="one") == 0
        assert cached(server, protocol, cache_salt="two") == 0
        assert cached(server, protocol, cache_salt="one") == CACHED


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_no_key_hits_the_prompts_of_another(protocol: str) -> None:
    with serving(config=CACHING, keys=ApiKeys(KEYS)) as server:
        first, second = KEYS
        assert cached(server, "http", key=first) == 0
        assert cached(server, protocol, key=second) == 0
        assert cached(server, protocol, key=first) == cached(server, protocol, key=second) == CACHED
        # A salt that spells another key's name does not lead there.
        assert cached(server, protocol, key=second, cache_salt="key 1") == 0
        assert cached(server, protocol, key=second, cache_salt="s") == 0
        assert cached(server, protocol, key=first, cache_salt="s") == 0


# Usage


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_counts_each_prompt_once(path: str) -> None:
    """The other choices find what the first has computed, which says nothing about the prompt."""
    n_cached = {COMPLETIONS: CACHED, CHAT: 112}[path]  # <user>, the prompt, <assistant>: 117 tokens
    with serving(config=CACHING) as server, http(server) as client:
        for expected in (0, n_cached):
            usage = client.post(path, json=body(path, n=3)).json()["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": expected}
        prompts = [PROMPT, "y" * 40, PROMPT]
        if path == COMPLETIONS:
            usage = client.post(path, json={"prompt": prompts, "max_tokens": 1, "n": 2}).json()["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": 2 * CACHED}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 2])
def test_streamed_usage_has_the_cached_tokens(path: str, n: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    n_cached = {COMPLETIONS: CACHED, CHAT: 112}[path]
    with serving(config=CACHING) as server, http(server) as client:
        for expected in (0, n_cached):
            text = client.post(path, json=body(path, n=n, stream=True, stream_options=options)).text
            events = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
            assert len(events) == n + 1 and not events[-1]["choices"]
            for event in events:
                assert event["usage"]["prompt_tokens_details"] == {"cached_tokens": expected}


def test_grpc_usage_is_that_of_each_choice() -> None:
    sampling = pb.SamplingParams(max_tokens=1, n=2)
    with serving(config=CACHING) as server, rpc(server) as stub:
        for expected in ([0, CACHED], [CACHED, CACHED]):
            answers = list(stub.Generate(pb.GenerateRequest(text=PROMPT, sampling=sampling), timeout=SOON))
            by_choice = sorted((answer.index, answer.usage.cached_tokens) for answer in answers)
            assert [n_cached for _, n_cached in by_choice] == expected


def test_without_a_cache_nothing_is_cached() -> None:
    config: ServingConfig = replace(CONFIG, scheduling=SchedulingConfig(prefix_caching=False))
    with serving(config=config) as server:
        assert [cached(server, protocol) for protocol in ("http", "grpc", "http")] == [0, 0, 0]


def test_the_access_log_has_the_cached_tokens_and_no_salt() -> None:
    handler = Lines()
    access_log.configure_access_log("off")
    access_log.LOGGER.setLevel(logging.INFO)
    access_log.LOGGER.addHandler(handler)
    try:
        options = EndpointOptions(port=0, grpc_port=0, access_log="json")
        with serving(config=CACHING, options=options) as server:
            for protocol in ("http", "http", "grpc"):
                cached(server, protocol, cache_salt="hidden")
            until(lambda: len(handler.lines) == 3, "the lines")
            assert [record.n_cached for record in server.service.timeline.requests] == [0, CACHED, CACHED]
    finally:
        access_log.configure_access_log("off")
    records = [json.loads(line) for line in handler.lines]
    assert [record.get("n_cached", record.get("cached_tokens")) for record in records] == [0, CACHED, CACHED]
    assert "hidden" not in "".join(handler.lines)


# Hashing


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_prompt_is_hashed_once_and_neither_by_the_scheduler_nor_on_the_loop(
    monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    threads: list[str] = []
    chain = prefix_lookup.chain_hashes

    def watched(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
        threads.append(threading.current_thread().name)
        return chain(root, token_ids, block_size)

    monkeypatch.setattr(prefix_lookup, "chain_hashes", watched)
    long = "x" * 400
    with serving(config=CACHING) as server, http(server) as client, rpc(server) as stub:
        if protocol == "http":
            filler = {"user": "u" * 20_000}  # a short body is read on the loop
            answer = client.post(COMPLETIONS, json=body(COMPLETIONS, long, n=4, **filler))
            assert answer.status_code == 200, answer.text
        else:
            sampling = pb.SamplingParams(max_tokens=1, n=4, bad_words=["w" * 1000] * 8 + ["v" * 100])
            list(stub.Generate(pb.GenerateRequest(text=long, sampling=sampling), timeout=SOON))
    (name,) = threads
    assert name not in (SCHEDULER_THREAD, "endpoints")
