"""Streams of server-sent events, as OpenAI's client reads them and as bytes on the wire."""

import asyncio
import itertools
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

import orca_jax
from orca_jax.request.request import FinishReason, Request
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import END, Server, serving, until
from tests.endpoint.http_client import connected, post_head, raw
from tests.endpoint.openai_client import async_client_of, by_seed, client_of, letters_by_seed
from tests.host.engines import SOON, GatedEngine, PacedEngine, writing
from tests.log_records import warnings_of

USER: Any = {"role": "user", "content": "Hi"}
USAGE: Any = {"include_usage": True}


class Scripts:
    """An engine's tokens, scripted for each one-token prompt, followed by end of sequence."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def __call__(self, request: Request, index: int) -> int:
        script = self.tokens[request.prompt_ids[0]]
        return script[index] if index < len(script) else END


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(by_seed) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx2.Client]:
    with connected(server) as http:
        yield http


def events(text: str) -> list[Any]:
    """The events of a stream that ended successfully."""
    *lines, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# Format


def test_a_stream_of_one_token_letter_by_letter(http: httpx2.Client) -> None:
    body = {"prompt": "a", "seed": 1, "max_tokens": 1, "stream": True, "stream_options": USAGE}
    answer = http.post("/v1/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    text = re.sub(r"cmpl-[0-9a-f]{32}", "ID", answer.text)
    text = re.sub(r'"created":\d+', '"created":0', text)
    head = (
        'data: {"id":"ID","created":0,"model":"test",'
        f'"system_fingerprint":"orca_jax-{orca_jax.__version__}",'
        '"object":"text_completion",'
    )
    # "a" is 97 = 3 * 26 + 19, and with the seed the twentieth letter after "a" is "u".
    assert text == (
        head + '"choices":[{"index":0,"text":"u","logprobs":null,"finish_reason":"length"}],"usage":null}\n\n'
        f'{head}"choices":[],"usage":{{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2,'
        '"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
        "data: [DONE]\n\n"
    )


def test_a_streamed_completion_with_openais_client(client: OpenAI) -> None:
    chunks = list(client.completions.create(model="test", prompt="abc", seed=0, max_tokens=9, stream=True))
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].id.startswith("cmpl-")
    assert {(chunk.object, chunk.model) for chunk in chunks} == {("text_completion", "test")}
    assert "".join(chunk.choices[0].text for chunk in chunks) == letters_by_seed(b"abc", 0, 9)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [*[None] * (len(chunks) - 1), "length"]
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


def test_a_streamed_chat_reply_with_openais_client() -> None:
    engine = GatedEngine(by_seed)
    with serving(engine=engine) as server, client_of(server) as client:
        stream = client.chat.completions.create(
            model="test", messages=[USER], seed=0, max_tokens=9, stream=True, stream_options=USAGE
        )
        engine.let(1)
        chunks = [next(stream)]
        engine.let(100)
        chunks += stream
    *pieces, last = chunks
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].id.startswith("chatcmpl-")
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    roles = [chunk.choices[0].delta.role for chunk in pieces]
    assert roles == ["assistant", *[None] * (len(pieces) - 1)] and len(pieces) > 1
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert text == letters_by_seed(b"<user>Hi<assistant>", 0, 9)
    assert pieces[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in pieces)
    assert last.choices == []
    assert last.usage and (last.usage.prompt_tokens, last.usage.completion_tokens) == (19, 9)


def test_openais_stream_accumulator_accepts_a_stream() -> None:
    def token(request: Request, index: int) -> int:
        return END if index == 4 else by_seed(request, index)

    with (
        serving(token) as server,
        client_of(server) as client,
        client.chat.completions.stream(model="test", messages=[USER], seed=0, n=2) as stream,
    ):
        whole = stream.get_final_completion()
    texts = [letters_by_seed(b"<user>Hi<assistant>", seed, 4) for seed in (0, 1)]
    assert [choice.message.content for choice in whole.choices] == texts
    assert [choice.message.role for choice in whole.choices] == ["assistant", "assistant"]


def test_every_token_is_sent_when_its_iteration_ends() -> None:
    engine = GatedEngine(writing("abcd"))
    with serving(engine=engine) as server, client_of(server) as client:
        try:
            with client.completions.create(model="test", prompt="a", max_tokens=4, stream=True) as stream:
                for letter in "abcd":
                    engine.let(1)  # no other iteration ends before this letter has arrived
                    chunk = next(stream)
                    assert chunk.choices[0].text == letter
        finally:
            engine.let(1000)


def test_choices_are_interleaved() -> None:
    engine = GatedEngine(by_seed)
    with serving(engine=engine) as server, client_of(server) as client:
        stream = client.completions.create(
            model="test", prompt=["ab", "xyz"], n=3, seed=7, max_tokens=12, stream=True, stream_options=USAGE
        )
        until(lambda: len(server.service.pool) == 6, "all six")
        engine.let(100)
        *chunks, usage = list(stream)
        assert max(record.n_rows for record in server.service.timeline.iterations) == 6
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    choices = [chunk.choices[0] for chunk in chunks]
    for index, (prompt, i) in enumerate(itertools.product((b"ab", b"xyz"), range(3))):
        mine = [choice for choice in choices if choice.index == index]
        assert "".join(choice.text for choice in mine) == letters_by_seed(prompt, 7 + i, 12)
        assert [choice.finish_reason for choice in mine] == [*[None] * (len(mine) - 1), "length"]
    assert usage.usage and (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (5, 72)


def test_every_chunk_has_the_usage_so_far(http: httpx2.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "abc", "n": 2, "max_tokens": 5, "stream": True, "stream_options": options}
    counts = [
        event["usage"]["completion_tokens"] for event in events(http.post("/v1/completions", json=body).text)
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 10 and counts[0] <= 5


# Text


@pytest.mark.parametrize(
    "text", ["ü€😀", "a\u2028b\u0085c", 'quote " and \\ and \n\n data: [DONE]', "\x00\x1f\x7f"]
)
def test_characters_are_never_split(text: str) -> None:
    scripts = Scripts()
    scripts.tokens[1] = list(text.encode())
    with serving(scripts, seconds=0.002) as server, client_of(server) as client, connected(server) as http:
        body: Any = {"prompt": [1], "max_tokens": 100}
        texts = [
            chunk.choices[0].text for chunk in client.completions.create(model="test", stream=True, **body)
        ]
        assert "".join(texts) == text
        assert all(texts[:-1]), "a piece without text has no chunk of its own"
        answer = http.post("/v1/completions", json={**body, "stream": True})
        assert answer.content.isascii()
        assert "".join(event["choices"][0]["text"] for event in events(answer.text)) == text


def cut(text: str, stops: list[str]) -> str:
    """The text before the stop string that completes first; of several, the longest."""
    for end in range(1, len(text) + 1):
        result = [stop for stop in stops if text[:end].endswith(stop)]
        if result:
            return text[: end - len(max(result, key=len))]
    return text


# Bytes of words, of split characters, of invalid UTF-8, and end of sequence.
TOKENS = st.lists(st.sampled_from([*b"aab", *"é€😀".encode(), 0xFF, 0x80, END]), min_size=1, max_size=24)
STOPS = st.lists(st.text(st.sampled_from("aabé€😀\ufffd"), min_size=1, max_size=4), max_size=3)


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[Scripts, httpx2.Client]]:
    scripts = Scripts()
    with serving(scripts) as server, httpx2.Client(base_url=server.url, timeout=SOON) as http:
        yield scripts, http


@given(tokens=TOKENS, stops=STOPS, n_more=st.integers(0, 3))
def test_a_stream_has_all_text_up_to_the_stop_string(
    scripted: tuple[Scripts, httpx2.Client], tokens: list[int], stops: list[str], n_more: int
) -> None:
    scripts, http = scripted
    scripts.tokens[1] = tokens
    body = {"prompt": [1], "max_tokens": len(tokens) + n_more, "stop": stops}
    streamed = [
        event["choices"][0]
        for event in events(http.post("/v1/completions", json={**body, "stream": True}).text)
    ]
    (whole,) = http.post("/v1/completions", json=body).json()["choices"]
    text = bytes(itertools.takewhile(lambda token: token != END, tokens)).decode("utf-8", "replace")
    assert whole["text"] == cut(text, stops)
    assert "".join(chunk["text"] for chunk in streamed) == whole["text"]
    assert streamed[-1]["finish_reason"] == whole["finish_reason"]


def test_without_a_tokenizer_every_token_has_a_chunk() -> None:
    engine = GatedEngine()
    with serving(engine=engine, tokenizer=False) as server, client_of(server) as client:
        stream = client.completions.create(model="test", prompt=[1], max_tokens=5, stream=True)
        engine.let(1)
        chunks = [next(stream)]
        engine.let(100)
        chunks += stream
    assert {chunk.choices[0].text for chunk in chunks} == {""}
    assert len(chunks) > 1, "a load generator sees when tokens come"


# Many streams


def test_fifty_concurrent_streams_are_complete_and_correct(server: Server) -> None:
    async def one(client: openai.AsyncOpenAI, i: int) -> tuple[str, str | None, int | None]:
        text, reason, n_output = "", None, None
        if i % 2:
            stream = await client.completions.create(
                model="test",
                prompt=f"prompt {i}",
                seed=i,
                max_tokens=i + 1,
                stream=True,
                stream_options=USAGE,
            )
            async for chunk in stream:
                for choice in chunk.choices:
                    text, reason = text + choice.text, choice.finish_reason
                n_output = chunk.usage.completion_tokens if chunk.usage else None
        else:
            messages: Any = [{"role": "user", "content": str(i)}]
            answer = await client.chat.completions.create(
                model="test", messages=messages, seed=i, max_tokens=i + 1, stream=True, stream_options=USAGE
            )
            async for part in answer:
                for delta in part.choices:
                    text, reason = text + (delta.delta.content or ""), delta.finish_reason
                n_output = part.usage.completion_tokens if part.usage else None
        return text, reason, n_output

    async def all_of_them() -> list[tuple[str, str | None, int | None]]:
        async with async_client_of(server) as client, asyncio.timeout(SOON):
            return await asyncio.gather(*[one(client, i) for i in range(50)])

    for i, came in enumerate(asyncio.run(all_of_them())):
        prompt = f"prompt {i}" if i % 2 else f"<user>{i}<assistant>"
        assert came == (letters_by_seed(prompt.encode(), i, i + 1), "length", i + 1)


# Streams that end early


def long_body(**fields: Any) -> bytes:
    body = json.dumps({"prompt": "a", "max_tokens": 500, "ignore_eos": True, **fields}).encode()
    return post_head("/v1/completions", f"Content-Length: {len(body)}") + body


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": True, "n": 4}, {}, {"n": 4}])
def test_a_client_that_disconnects_ends_its_requests(
    fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    n = fields.get("n", 1)
    with serving(seconds=0.02) as server:
        with raw(server, long_body(**fields)) as connection:
            if "stream" in fields:
                received = b""
                while b'"text"' not in received:
                    received += connection.recv(1 << 16)
            until(lambda: server.service.pool.n_running == n, "the requests' turn")
        until(server.at_rest, "the slots that it held")
        records = list(server.service.timeline.requests)
        assert [record.finish_reason for record in records] == [FinishReason.CANCELLED] * n
        assert all(record.n_output < 500 for record in records)
    assert not warnings_of(caplog, "asyncio", "uvicorn", "orca.http")


def test_a_client_that_resets_its_connection_ends_its_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(seconds=0.02) as server:
        with raw(server, long_body(stream=True, n=2)) as connection:
            until(lambda: server.service.pool.n_running == 2, "the requests' turn")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        until(server.at_rest, "the slots that it held")
    assert not warnings_of(caplog, "asyncio", "uvicorn", "orca.http")


@pytest.mark.parametrize("n", [1, 3])
def test_a_failed_engine_ends_a_stream_with_its_reason(n: int) -> None:
    engine = PacedEngine(writing("abc"), seconds=0.005)
    with serving(engine=engine) as server, client_of(server) as client:
        stream = client.completions.create(model="test", prompt="a", n=n, max_tokens=400, stream=True)
        next(stream)
        engine.error = RuntimeError("the device is gone")
        with pytest.raises(openai.APIError, match="the device is gone") as caught:
            list(stream)
        assert (caught.value.type, caught.value.code) == ("engine_error", "engine_failed")
        until(lambda: server.gateway.n_live == 0, "the end of the requests")


def test_nothing_follows_an_error_event() -> None:
    options = EndpointOptions(port=0, grpc_port=None, access_log="off", request_timeout=0.5)
    with serving(seconds=0.02, options=options) as server, connected(server) as http:
        body = {"prompt": "a", "max_tokens": 400, "stream": True, "stream_options": USAGE}
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    *before, last, rest = answer.text.split("\n\n")
    assert before and rest == ""
    assert json.loads(last.removeprefix("data: ")) == {
        "error": {
            "message": "the request was ended after 0.5 seconds, before it was complete",
            "type": "timeout_error",
            "param": None,
            "code": "timeout",
        }
    }


@pytest.mark.parametrize("fault", [{"temperature": -1}, {"n": 1000}, {"prompt": ""}, {"suffix": "x"}])
def test_a_stream_that_cannot_start_is_a_plain_http_error(http: httpx2.Client, fault: dict[str, Any]) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a", "stream": True, **fault})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["param"] == next(iter(fault))
