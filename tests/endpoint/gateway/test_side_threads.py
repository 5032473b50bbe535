"""Work that grows with the size of requests: which thread runs it, and how much may wait."""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from openai import OpenAI

from server.gateway import lanes, side_threads
from server.gateway.lanes import Lane
from server.gateway.side_threads import LONG, run_for_request
from server.http import authentication
from server.http.bodies import json_body
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import Server, serving, until
from tests.endpoint.http_client import JSON, connected, error_of
from tests.endpoint.rpc_client import asking
from tests.endpoint.rpc_client import client as rpc_client
from tests.host.engines import SOON

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def test_short_work_does_not_wait_for_very_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    async def main() -> None:
        slow = asyncio.create_task(run_for_request(10**6, lambda: gate.wait(SOON)))
        await asyncio.sleep(0)
        async with asyncio.timeout(SOON):
            assert await run_for_request(LONG, threading.current_thread) is threading.main_thread()
            assert (await run_for_request(LONG + 1, threading.current_thread)).name.startswith("long_")
        assert not slow.done()
        gate.set()
        assert await slow

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_long_body_is_parsed_on_a_thread_and_a_short_one_on_the_loop(
    server: Server, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()
    parse = json_body.parse

    def noted(data: bytes) -> object:
        seen.append(threading.current_thread().name)
        return parse(data)

    monkeypatch.setattr(json_body, "parse", noted)
    with connected(server) as client:
        for body in (b'{"nonsense": 1}', b'{"nonsense": 1}' + b" " * LONG):
            assert client.post(path, content=body, headers=JSON).status_code == 400
    assert seen[0] == "endpoints" and seen[1].startswith("long_")


def test_too_many_long_bodies_get_429_or_503_while_short_ones_are_accepted(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate = threading.Event(), threading.Event()
    parse = json_body.parse

    def held(data: bytes) -> object:
        if len(data) > LONG:
            begun.set()
            assert gate.wait(SOON)
        return parse(data)

    monkeypatch.setattr(json_body, "parse", held)
    monkeypatch.setattr(side_threads, "_LONG", Lane("few", threads=1, most_waiting=1, most_bytes=10**6))
    body = b'{"prompt": "a"}' + b" " * LONG
    with connected(server) as client, ThreadPoolExecutor(1) as clients:
        first = clients.submit(client.post, "/tokenize", content=body, headers=JSON)
        try:
            assert begun.wait(SOON)
            with connected(server) as other:
                refused = other.post("/tokenize", content=body, headers=JSON)
                assert (refused.status_code, error_of(refused)["code"]) == (429, "queue_full")
                assert int(refused.headers["retry-after"]) >= 1
                act = lanes.act_for
                with monkeypatch.context() as patch:  # the same from another address
                    patch.setattr(authentication, "act_for", lambda owner: act(f"not {owner}"))
                    refused = other.post("/tokenize", content=body, headers=JSON)
                assert (refused.status_code, error_of(refused)["code"]) == (503, "overloaded")
                assert int(refused.headers["retry-after"]) >= 1
                assert other.post("/tokenize", json={"prompt": "a"}).status_code == 200
        finally:
            gate.set()
        assert first.result(SOON).json()["tokens"] == [97]


def test_errors_in_long_bodies_are_those_of_short_ones(server: Server) -> None:
    """The error is the same on either thread."""
    faults = [
        b'{"prompt": 5%s}',
        b'{"prompt": "a", "temperature": "x"%s}',
        b'{"prompt": [1, true]%s}',
        b'{"prompt": "a", "nonsense": 1%s}',
        b'{"prompt": "a", "logit_bias": {"5": "x"}%s}',
        b'{"prompt": "a", "suffix": "b"%s}',
        b'{"prompt": "a", "n": 0%s}',
        b"[]%s",
        b'{"prompt": "a"%s',
    ]
    with connected(server) as client:
        for fault in faults:
            short, long = (
                client.post("/v1/completions", content=fault % more, headers=JSON)
                for more in (b"", b" " * LONG)
            )
            assert short.status_code == long.status_code == 400
            assert error_of(short)["param"] == error_of(long)["param"]
            assert (
                error_of(short)["message"].split(", at line")[0]
                == error_of(long)["message"].split(", at line")[0]
            )


def test_work_belongs_to_the_key_that_asked_for_it_or_to_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner is known for HTTP, gRPC and batches, although no route passes it on."""
    owners = list[str]()
    queue = Lane._queue

    def noted(lane: Lane, owner: str, work: Any) -> Any:
        owners.append(owner)
        return queue(lane, owner, work)

    monkeypatch.setattr(Lane, "_queue", noted)
    keys = ["key-number-1", "key-number-2"]
    options = EndpointOptions(port=0, grpc_port=0, access_log="off", batch_dir=tmp_path)
    long = " " * LONG
    body = b'{"prompt": "a"%s}' % long.encode()
    with serving(options=options, keys=ApiKeys(keys)) as server:
        names = set[str]()
        for key in keys:
            bearer = {"Authorization": f"Bearer {key}"}
            with connected(server) as client:
                assert client.post("/tokenize", content=body, headers={**JSON, **bearer}).status_code == 200
            over_http = taken(owners)
            with rpc_client(server) as stub, pytest.raises(grpc.RpcError):
                list(stub.Generate(asking("a" * LONG), metadata=[("authorization", f"Bearer {key}")]))
            assert taken(owners) == over_http
            line = {"custom_id": "1", "method": "POST", "url": COMPLETIONS, "body": {"prompt": 5, "x": long}}
            with OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as ai:
                file = ai.files.create(file=("a.jsonl", json.dumps(line).encode()), purpose="batch")
                batch = ai.batches.create(
                    input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
                )
                until(lambda id=batch.id: ai.batches.retrieve(id).status == "completed", "the batch")
            assert taken(owners) == over_http
            names |= over_http
        assert len(names) == 2
    with serving() as server, connected(server) as client:
        assert client.post("/tokenize", content=body, headers=JSON).status_code == 200
        assert taken(owners) == {"address 127.0.0.1"}


def taken(owners: list[str]) -> set[str]:
    found = set(owners)
    owners.clear()
    assert len(found) == 1
    return found
