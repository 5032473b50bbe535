"""One API key, or one address if there are no keys, may fill only its share of the queue."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import httpx2
import pytest

from orca_jax.config import ServingConfig
from server.process.addresses import network_of, owner_at
from server.rpc import generation_pb2 as pb
from server.rpc.generation_pb2_grpc import GenerationStub
from server.settings.api_keys import ApiKeys
from tests.endpoint.harness import CONFIG, Server, serving, until
from tests.host.engines import SOON, GatedEngine

SHARED = replace(CONFIG, max_batch_size=1, max_queue=8, max_queue_share=0.5)  # four per owner
KEYS = ("first-key", "second-key")


@pytest.fixture
def engine() -> Iterator[GatedEngine]:
    engine = GatedEngine(lambda request, index: 65)
    yield engine
    engine.let(1_000)


def completion(n: int) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 1, "n": n}


def client(server: Server, key: str | None = None) -> httpx2.Client:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx2.Client(base_url=server.url, headers=headers, timeout=SOON)


def fill(server: Server, by: httpx2.Client, n: int) -> Any:
    """A stream of `n` choices that wait while another request runs."""
    stream = by.stream("POST", "/v1/completions", json=completion(n) | {"stream": True})
    response = stream.__enter__()
    assert response.status_code == 200
    return stream


def test_one_key_fills_only_its_share_of_the_queue(engine: GatedEngine) -> None:
    with (
        serving(engine=engine, config=SHARED, keys=ApiKeys(KEYS)) as server,
        client(server, KEYS[0]) as greedy,
        client(server, KEYS[1]) as modest,
    ):
        streams = [fill(server, greedy, 1)]
        assert engine.waited_for.wait(SOON)
        streams.append(fill(server, greedy, 4))
        refused = greedy.post("/v1/completions", json=completion(1))
        assert refused.status_code == 429
        assert refused.json()["error"]["message"] == (
            "4 requests from this API key or address are waiting, its share of the queue; "
            "try again when some of them have started"
        )
        assert "retry-after" in refused.headers
        streams.append(fill(server, modest, 4))
        full = modest.post("/v1/completions", json=completion(1))
        assert full.json()["error"]["message"] == "the queue is full: 8 requests are waiting; try again later"
        engine.let(1_000)
        for stream in streams:
            stream.__exit__(None, None, None)


def test_without_keys_an_address_has_one_share_over_both_protocols(engine: GatedEngine) -> None:
    with (
        serving(engine=engine, config=SHARED) as server,
        client(server) as http,
        grpc.insecure_channel(server.grpc_address) as channel,
    ):
        stub: Any = GenerationStub(channel)
        running = fill(server, http, 1)
        assert engine.waited_for.wait(SOON)
        calls = [
            stub.Generate(
                pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=1)), timeout=SOON
            )
            for _ in range(3)
        ]
        until(lambda: server.service.pool.n_waiting == 3, "the calls")
        waiting = fill(server, http, 1)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(pb.GenerateRequest(text="a"), timeout=SOON))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "4 requests from this API key or address are waiting" in str(caught.value.details())
        engine.let(1_000)
        assert [len(list(call)) for call in calls] == [1, 1, 1]
        for stream in (running, waiting):
            stream.__exit__(None, None, None)


def test_a_request_may_not_ask_for_more_choices_than_the_share(engine: GatedEngine) -> None:
    with serving(engine=engine, config=SHARED) as server, client(server) as http:
        refused = http.post("/v1/completions", json=completion(5))
        assert refused.status_code == 400
        assert "one request may ask for 4 in all" in refused.json()["error"]["message"]


def test_long_prompts_fill_the_share_by_their_bytes(engine: GatedEngine) -> None:
    config: ServingConfig = replace(SHARED, max_queue=1024, max_queue_bytes=1 << 20)
    with serving(engine=engine, config=config) as server, client(server) as http:
        running = fill(server, http, 1)
        assert engine.waited_for.wait(SOON)
        long = {"prompt": [65] * 500, "max_tokens": 1, "n": 20, "stream": True}
        with http.stream("POST", "/v1/completions", json=long) as first:
            assert first.status_code == 200
            refused = http.post("/v1/completions", json=long | {"stream": False})
            assert refused.status_code == 429
            assert "bytes from this API key or address are waiting" in refused.json()["error"]["message"]
            engine.let(1_000)
        running.__exit__(None, None, None)


def test_an_ipv6_network_is_one_owner() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") == "10.0.0.1"
    assert owner_at("unix:/run/x") == "address unix:/run/x"


def test_a_key_is_identified_only_by_its_number() -> None:
    keys = ApiKeys(KEYS)
    assert [keys.check(f"Bearer {key}") for key in KEYS] == ["key 1", "key 2"]
    assert ApiKeys().check(None) is None


def test_many_choices_are_refused_before_any_is_submitted(engine: GatedEngine) -> None:
    """A client that asks again and again would have most accepted and cancelled each time."""
    config = replace(CONFIG, max_batch_size=1, max_queue=40, max_queue_share=1.0)
    with serving(engine=engine, config=config) as server, client(server) as user:
        streams = [fill(server, user, 1)]
        assert engine.waited_for.wait(SOON)
        streams.append(fill(server, user, 25))
        before = server.service.timeline.n_arrived
        refused = user.post("/v1/completions", json=completion(16))
        assert refused.status_code == 429
        assert "the queue has room for 15 more requests, not for 16" in refused.text
        assert server.service.timeline.n_arrived == before
        streams.append(fill(server, user, 15))
        engine.let(1_000)
        for stream in streams:
            stream.__exit__(None, None, None)
