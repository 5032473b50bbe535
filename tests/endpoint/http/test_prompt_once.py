"""Prompt log-probabilities for several choices: computed once, returned with each choice."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from orca_jax.request.request import FinishReason, Request
from server.http.generation.choices import Choices
from tests.endpoint.harness import Server, serving, until
from tests.endpoint.http_client import connected
from tests.host.engines import PacedEngine, writing


class Seen:
    """An engine's tokens; it records the requests."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}

    def __call__(self, request: Request, index: int) -> int:
        self.requests[request.request_id] = request
        return writing("abcd")(request, index)


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


@pytest.fixture(scope="module")
def server(seen: Seen) -> Iterator[Server]:
    with serving(seen, seconds=0.001) as server:
        yield server


PROMPTS, N = ["hello", "you there"], 5
BODY: dict[str, Any] = {"prompt": PROMPTS, "n": N, "echo": True, "logprobs": 2, "max_tokens": 3}


def asked_for(seen: Seen, response_id: str) -> list[int | None]:
    """The `prompt_logprobs` of each choice's request."""
    return [seen.requests[f"{response_id}-{i}"].sampling.prompt_logprobs for i in range(2 * N)]


def test_it_is_computed_once_and_returned_with_every_choice(client: httpx2.Client, seen: Seen) -> None:
    answer = client.post("/v1/completions", json=BODY).json()
    assert asked_for(seen, answer["id"]) == [2, *[None] * (N - 1)] * 2
    for i, choice in enumerate(answer["choices"]):
        prompt = PROMPTS[i // N]
        alone = client.post("/v1/completions", json={**BODY, "prompt": prompt, "n": 1}).json()["choices"][0]
        assert {**choice, "index": 0} == alone
        assert choice["logprobs"]["tokens"] == list(f"{prompt}abc")


def test_in_a_stream_every_choice_begins_with_it(client: httpx2.Client, seen: Seen) -> None:
    texts: dict[int, list[str]] = {i: [] for i in range(2 * N)}
    lines = client.post("/v1/completions", json={**BODY, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    for (choice,) in (chunk["choices"] for chunk in chunks):
        if choice["logprobs"] is not None:
            texts[choice["index"]] += choice["logprobs"]["tokens"]
    assert asked_for(seen, chunks[0]["id"]) == [2, *[None] * (N - 1)] * 2
    assert texts == {i: list(f"{PROMPTS[i // N]}abc") for i in range(2 * N)}


@pytest.mark.parametrize("stream", [False, True])
def test_the_other_choices_wait_for_the_first(
    server: Server, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test lets the first choice's first piece arrive last."""
    take, order = Choices.take, list[int]()

    async def late(self: Choices, index: int, piece: Any) -> Any:
        if index == 0 and not order:
            order.append(-1)
            for _ in range(50):
                await asyncio.sleep(0.002)
        shown = await take(self, index, piece)
        order.append(index)
        return shown

    monkeypatch.setattr(Choices, "take", late)
    with connected(server) as client:
        response = client.post("/v1/completions", json={**BODY, "prompt": "hello", "stream": stream})
    assert response.status_code == 200 and response.text.count('"h"') == N
    assert order[:2] == [-1, 0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("which", [0, 2])
def test_if_a_choice_fails_the_response_fails_without_waiting(stream: bool, which: int) -> None:
    begun = threading.Event()

    def token(request: Request, index: int) -> int:
        begun.set()
        return ord("a")

    engine = PacedEngine(token, seconds=0.1)
    with serving(engine=engine) as server, connected(server) as client:
        body = {**BODY, "prompt": "hello", "stream": stream, "max_tokens": 20}
        answer = list[httpx2.Response]()
        asking = threading.Thread(target=lambda: answer.append(client.post("/v1/completions", json=body)))
        asking.start()
        until(lambda: server.gateway.n_live == N, "all choices")

        def fail() -> None:
            lives = {live.request_id: live for live in server.gateway._live.values()}
            (live,) = (live for name, live in lives.items() if name.endswith(f"-{which}"))
            live.end(FinishReason.CANCELLED)

        server.call(fail)
        engine.seconds = 0.001
        asking.join(30)
        assert not asking.is_alive()
    (response,) = answer
    assert "cancelled" in response.text and "[DONE]" not in response.text
