"""An engine behind OpenAI's protocol: one stream of /v1/completions per request, with token ids as prompts.

Servers accept different fields. `start` finds out which ones with a request for two tokens, and `about` lists
them. The output tokens are counted, because a server may ignore a field.
"""

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Self
from urllib.parse import urlsplit

import uvloop

from bench.peers.played import Played
from bench.server.http_client import Exchange, body_of, get, post, status_of
from server.load.trace import Trace, TracedRequest

PLAY_SECONDS = 1800.0
_QUESTION_SECONDS = 120.0
_READ_BYTES = 1 << 16
_N_OUTPUT = "the request's output tokens"
# Ways to generate past an end-of-sequence token, the best first. A server without either refuses or ignores
# them.
_NO_END: tuple[dict[str, Any], ...] = ({"ignore_eos": True}, {"min_tokens": _N_OUTPUT}, {})
_USAGE: tuple[dict[str, Any], ...] = ({"stream_options": {"include_usage": True}}, {})
# No play shares a prefix cache with an earlier one, if the server knows the field.
_PLAY = "different in each play"
_SALT: tuple[dict[str, Any], ...] = ({"cache_salt": _PLAY}, {})
# Ways to get the ids of output tokens.
_TOKEN_IDS: tuple[dict[str, Any], ...] = ({"return_token_ids": True}, {"logprobs": 0})
_TOKEN_ID = "token_id:"  # prefix of a token's name if the token has no text
_VERSION_PATHS = ("/version", "/get_server_info", "/props", "/info")
_VERSION_FIELDS = ("version", "build_info", "docker_label")


class AddressFailed(Exception):
    """A server failed or cannot be measured; the message names it and the reason."""


class HttpEngine:
    """A server at a URL, with or without /v1 at its end; a context manager.

    `model` is the model's name in requests, by default the server's first. `body` is added to every request.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        model: str | None = None,
        body: Mapping[str, Any] | None = None,
        play_seconds: float = PLAY_SECONDS,
    ) -> None:
        self.name = name
        self.about: dict[str, Any] = {}
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise AddressFailed(f"{name}: {url!r} is not an address of the form http://HOST[:PORT][/PATH]")
        self._url = url
        self._address = (parts.hostname, parts.port or 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._model = model
        self._body = dict(body or {})
        self._play_seconds = play_seconds
        self._ids_field: dict[str, Any] | None = None
        self._salt = "none"
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def start(self) -> None:
        """Find out which fields the server accepts and set `about`. Raises AddressFailed."""
        self._runner.run(self._within(_QUESTION_SECONDS, self._meet()))

    def play(self, trace: Trace) -> Played:
        """Play a trace once. Raises AddressFailed."""
        return self._runner.run(self._within(self._play_seconds, self._play(trace, {})))

    def warm_up(self, trace: Trace) -> Played:
        """Play a trace once, with its tokens if the server returns them. Raises AddressFailed."""
        return self._runner.run(self._within(self._play_seconds, self._play(trace, self._ids_field or {})))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    async def _within(self, seconds: float, what: Any) -> Any:
        try:
            async with asyncio.timeout(seconds):
                return await what
        except TimeoutError:
            raise AddressFailed(f"{self.name} was not done within {seconds:g} seconds") from None
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            message = f"{self.name} ({self._url}) failed: {type(error).__name__}: {error}"
            raise AddressFailed(message) from error

    async def _meet(self) -> None:
        if self._model is None:
            models = json.loads(body_of(await self._whole(self._get("/v1/models"))))
            self._model = models["data"][0]["id"]
        request = TracedRequest((1, 2, 3), 2)
        refused = b""
        for no_end in _NO_END:
            for usage, salt in itertools.product(_USAGE, _SALT):
                body = {**no_end, **usage, **salt, **self._body}
                answer = await self._whole(self._post(request, body))
                if status_of(answer) == 200:
                    self._body = body
                    self._ids_field = await self._token_id_field(request)
                    self.about = {
                        "versions": await self._version(answer),
                        "flags": {
                            "url": self._url,
                            "model": self._model,
                            "sent": self._fields(_N_OUTPUT, {}),
                        },
                        "token ids by": self._ids_field,
                    }
                    return
                refused = answer
        text = refused.partition(b"\r\n\r\n")[2][:1000].decode(errors="replace")
        raise AddressFailed(
            f"{self.name} ({self._url}) refuses to stream /v1/completions for a prompt of token ids: "
            f"status {status_of(refused)}, {text}"
        )

    async def _token_id_field(self, request: TracedRequest) -> dict[str, Any] | None:
        for field in _TOKEN_IDS:
            answer = await self._whole(self._post(request, {**self._body, **field}))
            if status_of(answer) == 200 and (ids := token_ids(events_of(answer))) and len(ids) == 2:
                return field
        return None

    async def _version(self, answer: bytes) -> str:
        """The server's version, and the Server header of its answers."""
        lines: list[str] = []
        for path in _VERSION_PATHS:
            got = await self._whole(self._get(path))
            if status_of(got) != 200:
                continue
            try:
                found = json.loads(body_of(got))
            except ValueError:
                continue
            if isinstance(found, dict):
                lines += [f"{field} {found[field]}" for field in _VERSION_FIELDS if field in found]
        for line in answer.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n"):
            if line.lower().startswith("server:"):
                lines.append(line)
        return ", ".join(lines) or "unknown"

    async def _play(self, trace: Trace, more: Mapping[str, Any]) -> Played:
        self._salt = secrets.token_hex(8)
        if any(request.after is not None for request in trace):
            if self._ids_field is None:
                raise AddressFailed(f"{self.name} returns no token ids, which the next turns' prompts need")
            more = self._ids_field
        messages = [self._post(request, {**self._body, **more}) for request in trace]
        begin = time.perf_counter()
        tasks: list[asyncio.Task[_Answer]] = []

        async def one(request: TracedRequest, message: bytes) -> _Answer:
            due, prompt = begin + request.arrival, request.prompt_ids
            if request.after is not None:
                before = await tasks[request.after]
                due = begin + before.end + request.arrival
                prompt = (*before.prompt, *(token_ids(self._events(before.answer)) or ()), *prompt)
                message = self._post(replace(request, prompt_ids=prompt), {**self._body, **more})
            await asyncio.sleep(due - time.perf_counter())
            answer, first = await self._exchange(message)
            end = time.perf_counter() - begin
            return _Answer(prompt, due - begin, (first or time.perf_counter()) - begin, end, answer)

        for request, message in zip(trace, messages, strict=True):
            tasks.append(asyncio.create_task(one(request, message)))
        try:
            done = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        n_tokens: list[int] = []
        outputs: list[tuple[int, ...] | None] = []
        for each in done:
            events = self._events(each.answer)
            n_tokens.append(count(events))
            ids = token_ids(events)
            outputs.append(None if ids is None else tuple(ids))
        known = [ids for ids in outputs if ids is not None] if more else []
        return Played(
            seconds=max(each.end for each in done),
            latency=tuple(each.end - each.due for each in done),
            n_tokens=tuple(n_tokens),
            token_ids=tuple(known) if known and len(known) == len(trace) else None,
            first_token=tuple(each.first - each.due for each in done),
        )

    def _events(self, answer: bytes) -> list[dict[str, Any]]:
        """The events of a stream. Raises AddressFailed for another answer."""
        if status_of(answer) != 200:
            text = answer.partition(b"\r\n\r\n")[2][:1000].decode(errors="replace")
            raise AddressFailed(f"{self.name} answered with {status_of(answer)}: {text}")
        return events_of(answer)

    def _fields(self, n_output: int | str, more: Mapping[str, Any]) -> dict[str, Any]:
        """All fields of a request except the prompt."""
        fields = {"model": self._model, "max_tokens": n_output, "temperature": 0, "stream": True}
        fields |= {**self._body, **more}
        filled = {_N_OUTPUT: n_output, _PLAY: self._salt}
        return {
            name: filled.get(value, value) if isinstance(value, str) else value
            for name, value in fields.items()
        }

    def _post(self, request: TracedRequest, more: Mapping[str, Any]) -> bytes:
        body = {"prompt": list(request.prompt_ids), **self._fields(request.n_output, more)}
        return post(*self._address, f"{self._base}/v1/completions", body)

    def _get(self, path: str) -> bytes:
        return get(*self._address, self._base + path)

    async def _whole(self, message: bytes) -> bytes:
        answer, _ = await self._exchange(message)
        return answer

    async def _exchange(self, message: bytes) -> tuple[bytes, float | None]:
        """The raw answer, and when its first event arrived.

        It is parsed later, because server and client often share a processor.
        """
        answer = bytearray()
        first: float | None = None
        async with Exchange(*self._address, message) as exchange:
            while some := await exchange.sip(_READ_BYTES):
                answer += some
                if first is None and b"\ndata:" in answer:
                    first = time.perf_counter()
        if not answer:
            raise ConnectionError("it closed the connection without an answer")
        return bytes(answer), first


class ServedEngine:
    """An engine whose server `process` runs; a context manager that ends both.

    A subclass starts the process and then calls `meet`, before the engine plays.
    """

    def __init__(self, name: str, process: AbstractContextManager[Any], play_seconds: float) -> None:
        self.name = name
        self.about: dict[str, Any] = {}
        self._process = process
        self._play_seconds = play_seconds
        self._http: HttpEngine | None = None

    def meet(self, url: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Find out which fields the server accepts; `about` of the HttpEngine. Raises AddressFailed."""
        self._http = HttpEngine(self.name, url, body=body, play_seconds=self._play_seconds)
        self._http.start()
        return self._http.about

    def play(self, trace: Trace) -> Played:
        """Like HttpEngine's."""
        assert self._http is not None, "start was not called"
        return self._http.play(trace)

    def warm_up(self, trace: Trace) -> Played:
        """Like HttpEngine's."""
        assert self._http is not None, "start was not called"
        return self._http.warm_up(trace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if self._http is not None:
                self._http.__exit__(*error)
        finally:
            self._process.__exit__(*error)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A request's whole prompt and raw answer, and the seconds of its arrival, first event and end."""

    prompt: tuple[int, ...]
    due: float
    first: float
    end: float
    answer: bytes


def events_of(answer: bytes) -> list[dict[str, Any]]:
    """The stream's events. Raises ValueError if it is incomplete, and AddressFailed if it has an error."""
    text = body_of(answer).decode()
    found: list[dict[str, Any]] = []
    lines = [line.rstrip("\r") for line in text.split("\n")]
    data = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    if not data or data[-1] != "[DONE]":
        raise ValueError(f"the stream ended without [DONE]: {text[-500:]!r}")
    for line in data[:-1]:
        event = json.loads(line)
        if "error" in event:
            raise AddressFailed(f"the stream has an error: {line[:1000]}")
        found.append(event)
    return found


def count(events: list[dict[str, Any]]) -> int:
    """The number of output tokens: from the usage, or else one per event with text."""
    counts = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
    if counts:
        return int(counts[-1])
    return sum(bool(choice.get("text")) for event in events for choice in event.get("choices") or ())


def token_ids(events: list[dict[str, Any]]) -> list[int] | None:
    """The ids of a stream's tokens; None unless it has all of them."""
    found: list[int] = []
    for event in events:
        for choice in event.get("choices") or ():
            logprobs = choice.get("logprobs") or {}
            if "token_ids" in choice:
                found += choice["token_ids"] or ()
            elif all(name.startswith(_TOKEN_ID) for name in logprobs.get("tokens") or ()):
                found += [int(name.removeprefix(_TOKEN_ID)) for name in logprobs.get("tokens") or ()]
            else:
                return None
    return found or None
