"""Memory is returned to the system after long request bodies, and only then."""

import asyncio
import gc
from typing import Any

import httpx2
import pytest

from server.gateway import side_threads
from server.http.fields.strict import Strict
from server.process import freed_memory
from server.process.freed_memory import trim
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import Server, serving, until
from tests.host.engines import SOON

LONG = {"prompt": [1] * 200_000}


def test_trim_returns_freed_memory_to_the_system() -> None:
    assert trim(), "glibc has it"
    holes = [bytearray(200_000) for _ in range(500)]  # 100 MB, of which every second block stays allocated
    del holes[::2]
    before = resident_bytes()
    assert trim()
    assert before - resident_bytes() > 30e6


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


MESSAGES = [{"role": "user", "content": "a"}] * 500
BODIES: dict[str, tuple[str, Any]] = {
    "answered": ("/v1/chat/completions", {"messages": MESSAGES[:20], "max_tokens": 1, "user": "u" * 10_000}),
    "streamed": (
        "/v1/chat/completions",
        {"messages": MESSAGES[:20], "max_tokens": 1, "user": "u" * 10_000, "stream": True},
    ),
    "too long": ("/v1/chat/completions", {"messages": MESSAGES}),
    "an unknown field": ("/v1/chat/completions", {"messages": [*MESSAGES, {**MESSAGES[0], "x": 1}]}),
    "a wrong element": ("/v1/chat/completions", {"messages": [*MESSAGES, 1]}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
    "responses": ("/v1/responses", {"input": MESSAGES}),
}


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=BODIES)
def test_a_long_body_is_freed_at_once(path: str, body: Any) -> None:
    """No reference cycle holds the body until a garbage collection, which is rare in a server."""
    options = EndpointOptions(port=0, grpc_port=None, access_log="off", max_stored_responses=0)
    with serving(options=options) as server, httpx2.Client(base_url=server.url, timeout=SOON) as client:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                client.post(path, json=body)
            until(lambda: server.at_rest() and n_models() < 20, "the end of what the bodies had")
        finally:
            gc.enable()


CALLS: dict[str, tuple[str, Any]] = {
    "choices": ("/v1/completions", {"prompt": "a", "max_tokens": 4, "n": 4}),
    "log-probabilities": ("/v1/completions", {"prompt": "a", "max_tokens": 4, "logprobs": 1, "stream": True}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES[:2], "max_tokens": 4}),
    "a chat stream": ("/v1/chat/completions", {"messages": MESSAGES[:2], "max_tokens": 4, "stream": True}),
    "responses": ("/v1/responses", {"input": "a", "max_output_tokens": 4}),
    "messages": ("/v1/messages", {"messages": MESSAGES[:2], "max_tokens": 4, "stream": True}),
    "a wrong body": ("/v1/completions", {"prompt": "a", "max_tokens": -1}),
    "no such route": ("/v1/nothing", {}),
}


def leave_a_stream(server: Server, n: int) -> None:
    """Ask for `n` choices as a stream, and leave when the first is under way."""
    body = {"prompt": "a", "max_tokens": 400, "n": n, "ignore_eos": True, "stream": True}
    with (
        httpx2.Client(base_url=server.url, timeout=SOON) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        next(response.iter_bytes())


def test_requests_and_connections_leave_no_cycles() -> None:
    """Only a garbage collection would free them, which holds all threads, and longer the more there are."""
    options = EndpointOptions(port=0, grpc_port=None, access_log="off", max_stored_responses=0)
    with serving(options=options) as server:

        def call(path: str, body: Any) -> None:
            with httpx2.Client(base_url=server.url, timeout=SOON) as client:  # a connection each
                client.post(path, json=body)

        def call_all() -> None:
            for path, body in CALLS.values():
                call(path, body)
            leave_a_stream(server, 1)
            leave_a_stream(server, 3)

        call_all()
        until(server.at_rest, "the end of all requests")
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(3):
                call_all()
            until(server.at_rest, "the end of all requests")
            gc.collect()
            names = {f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not names & {"orca_jax.request.request.Request", "orca_jax.service.output.Output"}, names
    assert not any("Transport" in name for name in names), names


def n_models() -> int:
    """The number of parts of request bodies in memory."""
    return sum(isinstance(each, Strict) for each in gc.get_objects())


@pytest.mark.parametrize("n_long", [[0, 0, 0, 0], [0, 1, 1, 3]])
def test_memory_is_trimmed_only_after_long_bodies(n_long: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[None] = []
    counts = iter(n_long)
    monkeypatch.setattr(freed_memory, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(freed_memory, "trim", lambda: trimmed.append(None))
    with pytest.raises((StopIteration, RuntimeError)):
        asyncio.run(asyncio.wait_for(freed_memory.give_back(lambda: next(counts)), SOON))
    assert len(trimmed) == len(set(n_long)) - 1


def test_a_server_trims_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[None] = []
    monkeypatch.setattr(freed_memory, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(freed_memory, "trim", lambda: trimmed.append(None))
    options = EndpointOptions(port=0, grpc_port=None, access_log="off")
    with serving(options=options) as server, httpx2.Client(base_url=server.url, timeout=SOON) as client:
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        before = side_threads.n_very_long()
        assert client.post("/v1/completions", json=LONG).status_code == 400
        assert side_threads.n_very_long() > before
        until(lambda: bool(trimmed), "a trim")
