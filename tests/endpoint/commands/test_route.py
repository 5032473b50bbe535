"""The proxy of `orca route`: two steps a request, and what it does if a step fails."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import requests
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from server.apart.proxy import Proxy, ProxyOptions
from server.errors import UsageError
from server.process.addresses import server_url

PARAMS = {"do_remote_prefill": True, "remote_request_id": "a lease", "remote_port": 7}


@contextmanager
def running(app: Starlette) -> Iterator[str]:
    """Run an application on a free port, and give its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, lifespan="on", log_config=None, ws="none", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


class Stand:
    """A server that notes what it is asked and answers as a test says."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        self.answer: Response = JSONResponse({"id": "x", "kv_transfer_params": PARAMS})

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        said = json.loads(body) if body.startswith(b"{") else body
        self.asked.append((request.url.path, dict(request.headers), said))
        return self.answer

    def app(self) -> Starlette:
        paths = ("/v1/completions", "/v1/chat/completions", "/v1/models")
        return Starlette(routes=[Route(path, self.__call__, methods=["GET", "POST"]) for path in paths])


@pytest.fixture
def stands() -> Iterator[tuple[Stand, Stand, str]]:
    """A server of each role, and the proxy's address; a second of each is gone."""
    prefill, decode = Stand(), Stand()
    decode.answer = JSONResponse({"choices": []})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with running(prefill.app()) as first, running(decode.app()) as second:
        options = ProxyOptions(prefill=[first, gone], decode=[second, gone], max_body_bytes=1 << 16)
        with running(Proxy(options).app()) as proxy:
            yield prefill, decode, proxy


def test_the_first_server_computes_the_prompt_and_the_second_goes_on(
    stands: tuple[Stand, Stand, str],
) -> None:
    prefill, decode, url = stands
    body = {"prompt": "a", "max_tokens": 9, "stream": True, "stream_options": {}, "n": 2, "min_tokens": 3}

    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    decode.answer = StreamingResponse(events(), media_type="text/event-stream")
    headers = {"Authorization": "Bearer k", "X-Request-Id": "r", "Cookie": "c"}
    answer = requests.post(f"{url}/v1/completions", json=body, headers=headers, timeout=10)
    assert answer.content == b"data: 1\n\ndata: 2\n\n"
    assert answer.headers["content-type"].startswith("text/event-stream")
    ((path, sent, first),) = prefill.asked
    assert path == "/v1/completions" and first == {
        "prompt": "a",
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
            "offer_early": True,
        },
    }
    assert (sent["authorization"], sent["x-request-id"]) == ("Bearer k", "r") and "cookie" not in sent
    ((path, sent, second),) = decode.asked
    assert path == "/v1/completions" and second == body | {"kv_transfer_params": PARAMS}
    assert sent["authorization"] == "Bearer k"


class Offering(Stand):
    """A server that gives its params at once, and the rest of its answer when a test lets it."""

    def __init__(self, rest: bytes | None = b'"choices":[]}') -> None:
        super().__init__()
        self.goes_on, self.ended = threading.Event(), threading.Event()

        async def body() -> AsyncIterator[bytes]:
            try:
                line = b'{"kv_transfer_params":' + json.dumps(PARAMS).encode()
                for piece in (line[:9], line[9:], b",", b"\n"):
                    yield piece
                    await asyncio.sleep(0.01)
                while not self.goes_on.is_set():
                    await asyncio.sleep(0.005)
                if rest is None:
                    raise ConnectionError("it is killed")
                yield rest
            finally:
                self.ended.set()

        self.answer = StreamingResponse(body(), headers={"x-orca-offered": "1"})


@contextmanager
def routed(prefill: Stand, decode: Stand) -> Iterator[str]:
    with (
        running(prefill.app()) as first,
        running(decode.app()) as second,
        running(Proxy(ProxyOptions(prefill=[first], decode=[second])).app()) as proxy,
    ):
        yield proxy


def test_the_second_server_is_asked_while_the_first_computes_the_prompt() -> None:
    prefill, decode = Offering(), Stand()

    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        prefill.goes_on.set()
        while not prefill.ended.is_set():
            await asyncio.sleep(0.005)
        yield b"data: 2\n\n"

    decode.answer = StreamingResponse(events(), media_type="text/event-stream")
    with routed(prefill, decode) as url:
        answer = requests.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=10)
        assert answer.content == b"data: 1\n\ndata: 2\n\n"
    assert decode.asked[0][2] == {"prompt": "a", "kv_transfer_params": PARAMS}


def test_a_first_server_that_breaks_after_its_offer_costs_nothing() -> None:
    """Whether it does before the second one has answered or after it."""
    prefill, decode = Offering(rest=None), Stand()
    prefill.goes_on.set()
    decode.answer = JSONResponse({"choices": [1]})
    with routed(prefill, decode) as url:
        answer = requests.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=10)
        assert (answer.status_code, answer.json()) == (200, {"choices": [1]})
    assert decode.asked[0][2]["kv_transfer_params"] == PARAMS


@pytest.mark.parametrize("leaves", [False, True])
def test_the_end_of_the_answer_ends_the_first_step_too(leaves: bool) -> None:
    """The client leaves, or the second server has computed the prompt itself."""
    prefill, decode = Offering(), Stand()

    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        while leaves:
            yield b"data: 1\n\n"
            await asyncio.sleep(0.01)

    decode.answer = StreamingResponse(events(), media_type="text/event-stream")
    with routed(prefill, decode) as url:
        with requests.post(f"{url}/v1/completions", json={"prompt": "a"}, stream=True, timeout=10) as answer:
            assert next(answer.iter_lines(chunk_size=1)) == b"data: 1"
            if not leaves:
                assert not answer.content.strip()
        assert prefill.ended.wait(10) and not prefill.goes_on.is_set()


def test_a_step_that_fails_is_left_to_the_other_servers(stands: tuple[Stand, Stand, str]) -> None:
    prefill, decode, url = stands
    for i, answer in enumerate(
        (JSONResponse({}, 503), JSONResponse({"id": "x"}), Response("nonsense"), JSONResponse([]))
    ):
        prefill.answer = answer  # every second request finds a server that is gone
        for _ in range(2):
            answer = requests.post(f"{url}/v1/chat/completions", json={"messages": i}, timeout=10)
            assert answer.status_code == 200
            assert decode.asked.pop()[2] == {"messages": i}
    assert len(prefill.asked) == 4


def test_what_the_second_server_says_reaches_the_client(stands: tuple[Stand, Stand, str]) -> None:
    prefill, decode, url = stands
    decode.answer = JSONResponse({"error": "no"}, 429, {"Retry-After": "3"})
    answer = requests.post(f"{url}/v1/completions", data=b"not JSON", timeout=10)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert not prefill.asked and decode.asked[0][2] == b"not JSON"
    answer = requests.get(f"{url}/v1/models", timeout=10)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    answer = requests.post(f"{url}/v1/completions", data=b" " * (1 << 16) + b"{}", timeout=10)
    assert answer.status_code == 413 and "65536 bytes" in answer.json()["error"]["message"]


def test_an_address_is_a_servers() -> None:
    assert server_url("http://a:1/v1", flag="--url") == "http://a:1"
    assert server_url("https://[::1]/x/", flag="--url") == "https://[::1]/x"
    for wrong in ("", "a:1", "ftp://a", "http://", "http://a:b", "http://a:0", "http://a?b"):
        with pytest.raises(UsageError, match=r"--url is .*; it must begin with http://"):
            server_url(wrong, flag="--url")
