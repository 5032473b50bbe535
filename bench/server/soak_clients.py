"""The clients of a soak: each does one thing, well behaved or not, and returns the outcome.

What a client may see is checked here; anything else raises Wrong.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from bench.server.http_client import Exchange, events_of, get, post
from server.rpc.generation_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    CancelRequest,
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    TokenIds,
)
from server.rpc.generation_pb2_grpc import GenerationStub

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = ("In", "the", "beginning", "was", "a", "word", "and", "he", "said", "unto", "them", "go", "forth")

# Each with the status that it must get.
BAD_REQUESTS: tuple[tuple[str, object, int], ...] = (
    (COMPLETIONS, b"{", 400),
    (COMPLETIONS, b"\xff\xfe", 400),
    (COMPLETIONS, [], 400),
    (COMPLETIONS, {"max_tokens": 5}, 400),
    (COMPLETIONS, {"prompt": "In", "max_tokenz": 5}, 400),
    (COMPLETIONS, {"prompt": "In", "max_tokens": 0}, 400),
    (COMPLETIONS, {"prompt": "In", "max_tokens": 1_000_000}, 400),
    (COMPLETIONS, {"prompt": "In", "temperature": -1}, 400),
    (COMPLETIONS, {"prompt": "In", "temperature": "hot"}, 400),
    (COMPLETIONS, {"prompt": [5, -1]}, 400),
    (COMPLETIONS, {"prompt": "the " * 3000}, 400),
    (COMPLETIONS, {"prompt": "In", "logprobs": 30}, 400),
    (COMPLETIONS, {"prompt": "In", "guided_regex": "("}, 400),
    (COMPLETIONS, {"prompt": "In", "frequency_penalty": 3}, 400),
    (COMPLETIONS, {"prompt": "In", "model": "another"}, 404),
    (CHAT, {"messages": []}, 400),
    (CHAT, {"messages": [{"role": "nobody", "content": "In"}]}, 400),
    (CHAT, {"prompt": "In"}, 400),
    ("/v1/nothing", {}, 404),
    ("/health", {}, 405),
)


class Wrong(Exception):
    """A client saw something that must not happen."""


class Clients:
    """Creates clients; `host` and `port` are HTTP's; without a `channel` none uses gRPC."""

    def __init__(self, host: str, port: int, channel: grpc.aio.Channel | None) -> None:
        self._address = (host, port)
        self._generation = None if channel is None else GenerationStub(channel)
        whole: dict[Callable[[random.Random], Awaitable[str]], int] = {self.completion: 6, self.chat: 3}
        parts: dict[Callable[[random.Random], Awaitable[str]], int] = {
            self.disconnect: 4,
            self.slow_reader: 2,
            self.bad_request: 3,
        }
        if channel is not None:
            whole |= {self.grpc_stream: 4}
            parts |= {self.grpc_cancel: 2, self.grpc_deadline: 2, self.grpc_bad: 1, self.grpc_cancel_by_id: 1}
        self._well_behaved, self._all = whole, whole | parts

    def choose(
        self, rng: random.Random, *, well_behaved: bool = False
    ) -> Callable[[random.Random], Awaitable[str]]:
        """A random client; `well_behaved` ones read everything promptly."""
        kinds = self._well_behaved if well_behaved else self._all
        return rng.choices(list(kinds), list(kinds.values()))[0]

    # HTTP

    async def completion(self, rng: random.Random) -> str:
        """A completion, read to its end."""
        body = {**_sampling(rng), "prompt": _prompt(rng)}
        if rng.random() < 0.2:
            body |= {"logprobs": rng.randrange(4), "echo": rng.random() < 0.5}
        async with self._exchange(post(*self._address, COMPLETIONS, body)) as exchange:
            await exchange.head()
            return await _read(exchange, body)

    async def chat(self, rng: random.Random) -> str:
        """A chat completion, read to its end."""
        messages = [{"role": "user", "content": _text(rng)}]
        body = {**_sampling(rng), "messages": messages}
        if rng.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": rng.randrange(4)}
        async with self._exchange(post(*self._address, CHAT, body)) as exchange:
            await exchange.head()
            return await _read(exchange, body)

    async def disconnect(self, rng: random.Random) -> str:
        """Disconnects before the answer, in the middle of it, or in the middle of its own request."""
        body = {**_sampling(rng, at_least=50), "prompt": _prompt(rng)}
        request = post(*self._address, COMPLETIONS, body)
        if rng.random() < 0.1:
            request = request[: rng.randrange(1, len(request))]
        async with self._exchange(request) as exchange:
            try:
                async with asyncio.timeout(rng.random() ** 2):
                    while await exchange.sip(rng.randrange(1, 5000)):
                        pass
                return "was done before it left"
            except TimeoutError:
                return "left"

    async def slow_reader(self, rng: random.Random) -> str:
        """Reads a few bytes now and then; finally disconnects or reads the rest."""
        body = {**_sampling(rng, at_least=100), "prompt": _prompt(rng), "stream": True}
        async with self._exchange(post(*self._address, COMPLETIONS, body), receive_buffer=4096) as exchange:
            await exchange.head()
            if exchange.status != 200:
                return await _read(exchange, body)
            for _ in range(rng.randrange(2, 20)):
                await asyncio.sleep(rng.random() * 0.5)
                start = await exchange.sip(rng.randrange(1, 50))
                if not start:
                    return "had read all"
            if rng.random() < 0.5:
                return "left"
            while await exchange.sip(1 << 16):
                pass
            return "read the rest"

    async def bad_request(self, rng: random.Random) -> str:
        """An invalid request; the answer must have its status, and JSON that says what is wrong."""
        path, body, status = rng.choice(BAD_REQUESTS)
        async with self._exchange(post(*self._address, path, body)) as exchange:
            await exchange.head()
            answer = await exchange.json()
        if exchange.status != status or not answer["error"]["message"]:
            raise Wrong(f"{path} {str(body)[:100]} got {exchange.status}, not {status}: {str(answer)[:300]}")
        return f"refused with {status}"

    async def get(self, path: str) -> bytes:
        """The body of a GET; raises Wrong if the status is not 200."""
        async with self._exchange(get(*self._address, path)) as exchange:
            await exchange.head()
            body = await exchange.body()
        if exchange.status != 200:
            raise Wrong(f"GET {path} got {exchange.status}: {body[:300]!r}")
        return body

    async def send(self, body: dict[str, Any]) -> None:
        """One completion that must succeed, for warming up."""
        async with self._exchange(post(*self._address, COMPLETIONS, body)) as exchange:
            await exchange.head()
            outcome = await _read(exchange, body)
        if outcome != "complete":
            raise Wrong(f"{body} was {outcome}")

    def _exchange(self, request: bytes, *, receive_buffer: int | None = None) -> Exchange:
        return Exchange(*self._address, request, receive_buffer=receive_buffer)

    # gRPC

    async def grpc_stream(self, rng: random.Random) -> str:
        """A stream, read to its end."""
        return await self._finish(self._generate(rng))

    async def grpc_cancel(self, rng: random.Random) -> str:
        """Cancels its own call at a random moment."""
        call = self._generate(rng, at_least=50)
        reading = asyncio.create_task(self._finish(call, may=("CANCELLED",)))
        try:
            async with asyncio.timeout(rng.random() ** 2):
                await asyncio.shield(reading)
            return "was done before it cancelled"
        except TimeoutError:
            call.cancel()
            await asyncio.wait([reading])
            return "cancelled" if reading.cancelled() else reading.result()

    async def grpc_deadline(self, rng: random.Random) -> str:
        """Sets a deadline that mostly passes."""
        return await self._finish(
            self._generate(rng, at_least=100, timeout=0.02 + 0.5 * rng.random()), may=("DEADLINE_EXCEEDED",)
        )

    async def grpc_cancel_by_id(self, rng: random.Random) -> str:
        """Ends its request with the method Cancel, from another call."""
        assert self._generation is not None
        request_id = f"soak-{rng.getrandbits(64):x}"
        reading = asyncio.create_task(
            self._finish(self._generate(rng, at_least=50, request_id=request_id), may=("CANCELLED",))
        )
        await asyncio.sleep(rng.random() ** 2)
        await self._generation.Cancel(CancelRequest(request_id=request_id), timeout=30)
        return await reading

    async def grpc_bad(self, rng: random.Random) -> str:
        """An invalid request; the status must be INVALID_ARGUMENT."""
        assert self._generation is not None
        request = rng.choice(
            (
                GenerateRequest(),
                GenerateRequest(text="In", sampling=SamplingParams(max_tokens=0)),
                GenerateRequest(text="In", sampling=SamplingParams(temperature=-1.0)),
                GenerateRequest(token_ids=TokenIds(ids=[-5])),
            )
        )
        outcome = await self._finish(self._generation.Generate(request), may=("INVALID_ARGUMENT",))
        if outcome != "INVALID_ARGUMENT":
            raise Wrong(f"gRPC {request} was {outcome}")
        return outcome

    def _generate(
        self, rng: random.Random, *, at_least: int = 1, timeout: float | None = None, request_id: str = ""
    ) -> "grpc.aio.UnaryStreamCall[GenerateRequest, GenerateResponse]":
        assert self._generation is not None
        sampling = SamplingParams(
            max_tokens=rng.randrange(at_least, at_least + 80),
            temperature=rng.choice((0.0, 0.8)),
            min_p=rng.choice((0.0, 0.1)),
            repetition_penalty=rng.choice((1.0, 1.2)),
            logprobs=rng.choice((None, 2)),
        )
        request = GenerateRequest(text=_text(rng), sampling=sampling, request_id=request_id)
        return self._generation.Generate(request, timeout=timeout)

    async def _finish(
        self,
        call: "grpc.aio.UnaryStreamCall[GenerateRequest, GenerateResponse]",
        *,
        may: Sequence[str] = (),
    ) -> str:
        reasons: list[int] = []
        try:
            async for response in call:
                if reasons:
                    raise Wrong("a message came after the one with the finish reason")
                if response.finish_reason:
                    reasons.append(response.finish_reason)
        except grpc.aio.AioRpcError as error:
            name = error.code().name
            if name == "RESOURCE_EXHAUSTED":
                _check_retry_after(dict(error.trailing_metadata() or ()).get("retry-after"))
                return "refused, queue full"
            if name in may:  # a late status or deadline may come between the last message and the end
                return f"complete, then {name}" if reasons else name
            raise Wrong(f"gRPC ended with {name}: {error.details()}") from error
        if reasons not in ([FINISH_REASON_STOP], [FINISH_REASON_LENGTH]):
            raise Wrong(f"a gRPC stream ended with the finish reasons {reasons}")
        return "complete"


def _text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randrange(1, 20)))


def _prompt(rng: random.Random) -> object:
    kind = rng.random()
    if kind < 0.7:
        return _text(rng)
    ids = [rng.randrange(1, 2000) for _ in range(rng.randrange(1, 60))]
    return ids if kind < 0.9 else [_text(rng), _text(rng)]


_PARAMETERS: tuple[dict[str, Any], ...] = (
    {"min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 1.0, "presence_penalty": -0.5},
    {"logit_bias": {"300": 5, "301": -100}},
    {"min_tokens": 1, "stop_token_ids": [300]},
    {"allowed_token_ids": list(range(300, 340))},
    {"bad_words": ["the", "and he"]},
    {"guided_choice": ["red", "green", "blue"]},
    {"guided_regex": "[a-z]{3,9}( [a-z]{3,9}){0,6}"},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, "a"]}}}},
)


def _sampling(rng: random.Random, *, at_least: int = 1) -> dict[str, Any]:
    body: dict[str, Any] = {
        "max_tokens": rng.randrange(at_least, at_least + 80),
        "temperature": rng.choice((0, 0.8, 1)),
        "stream": rng.random() < 0.7,
    }
    if rng.random() < 0.2:
        body["n"] = rng.randrange(2, 4)
    if rng.random() < 0.3:
        body |= {"top_p": 0.9, "top_k": 40}
    if rng.random() < 0.3:
        body["stop"] = ["And ", "the"]
    if rng.random() < 0.5:
        body |= rng.choice(_PARAMETERS)
    if body["stream"] and rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    return body


async def _read(exchange: Exchange, body: dict[str, Any]) -> str:
    """Read the answer to its end and return the outcome; call it after `exchange.head`."""
    answer = await exchange.body()
    if exchange.status == 429:
        _check_retry_after(exchange.headers.get("retry-after"))
        return "refused, queue full"
    if exchange.status == 504 and not body.get("stream"):
        return "timed out"
    if exchange.status != 200:
        raise Wrong(f"{str(body)[:200]} got {exchange.status}: {answer[:300]!r}")
    prompt = body.get("prompt")
    n_prompts = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], str) else 1
    n_choices = n_prompts * body.get("n", 1)
    if body.get("stream"):
        return _end_of_stream(events_of(answer), n_choices)
    reasons = [choice["finish_reason"] for choice in json.loads(answer)["choices"]]
    if len(reasons) != n_choices or not set(reasons) <= {"stop", "length"}:
        raise Wrong(f"{n_choices} choices ended with {reasons}")
    return "complete"


def _end_of_stream(events: Sequence[str], n_choices: int) -> str:
    """Check that there is one finish reason per choice and [DONE], or one error at the end."""
    ended: Counter[int] = Counter()
    for i, data in enumerate(events):
        if data == "[DONE]":
            if i != len(events) - 1 or ended != dict.fromkeys(range(n_choices), 1):
                raise Wrong(f"[DONE] after the finish reasons of {dict(ended)}, {n_choices} choices")
            return "complete"
        event = json.loads(data)
        if "error" in event:
            if (
                i != len(events) - 1
                or event["error"]["code"] != "timeout"
                or max(ended.values(), default=0) > 1
            ):
                raise Wrong(f"an error in a stream: {event}")
            return "timed out"
        for choice in event["choices"]:
            if choice["finish_reason"] is not None:
                ended[choice["index"]] += 1
    raise Wrong(f"a stream ended with neither [DONE] nor an error: {events[-1:]}")


def _check_retry_after(value: object) -> None:
    if not isinstance(value, str) or not value.isdigit() or not 1 <= int(value) <= 60:
        raise Wrong(f"a full queue's Retry-After is {value!r}")
