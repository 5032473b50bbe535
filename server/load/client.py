"""One process of the load client: sends its share of a trace, and notes when each answer's parts arrive.

A stream is read with as little work as possible, so that the client is not what is measured (http_stream.py).
Events are parsed as JSON until the first one with output, then only the one with the finish reason and that
with the usage; the others are counted. All times are of the system's monotonic clock, which processes share.
"""

import asyncio
import json
import random
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import uvloop

from server.load.http_stream import Connections
from server.load.trace import TracedRequest

Route = Literal["completions", "chat"]
_MAX_EVENT_BYTES = 1 << 20  # of an event that has not ended, after which the answer counts as failed
_MAX_ERROR_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server and what every request to it says."""

    url: str  # with /v1
    model: str
    route: Route
    headers: Mapping[str, str]
    extra: Mapping[str, Any]  # further fields of a body
    timeout: float  # seconds for a whole request

    def body(self, prompt: Sequence[int], n_output: int, *, needs_ids: bool) -> dict[str, Any]:
        """The body of a request for exactly `n_output` tokens, on servers that know `ignore_eos`."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": n_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.route == "chat":
            body["messages"] = [{"role": "user", "content": words(prompt)}]
        else:
            body["prompt"] = list(prompt)
        if needs_ids:
            body["return_token_ids"] = True
        return body | dict(self.extra)


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it; times in seconds, NaN for what did not happen.

    `planned` is when it should have been sent, and `times` has the arrival of each event with output.
    """

    index: int
    planned: float
    sent: float
    ended: float = float("nan")
    times: "array[float]" = field(default_factory=lambda: array("d"))
    n_input: int = 0
    n_output: int = 0
    n_cached: int = 0
    error: str | None = None
    token_ids: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True)
class Share:
    """The requests of one process.

    `indices` are their numbers in the whole trace, in which `after` counts; a turn and the turn before are in
    one share. At most `concurrency` run at once; None: no limit.
    """

    target: Target
    requests: Sequence[TracedRequest]
    indices: Sequence[int]
    start: float
    concurrency: int | None


@dataclass(frozen=True, slots=True)
class Played:
    """The outcomes of a share; seconds of processor time, and of real time from the start to the last end."""

    outcomes: list[Outcome]
    cpu: float
    seconds: float


# Common English words, each of which is one token in most vocabularies.
_WORDS = (
    "the of and to in is that for it was on are as with his they at be this from have or by one had not but",
    "what all were when we there can an your which their said if do will each about how up out them then she",
    "many some so these would other into has more her two like him see time could no make than first been",
    "who now people my made over did down only way find use may water long little very after words called",
)
_WORD = " ".join(_WORDS).split()


def words(prompt: Sequence[int]) -> str:
    """A text of as many words as the prompt has tokens, the same for the same tokens."""
    return " ".join([_WORD[token % len(_WORD)] for token in prompt])


def play(share: Share, on_end: Callable[[], object]) -> Played:
    """Send the requests of a share at their times; `on_end` is called after each."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_play(share, on_end))


async def _play(share: Share, on_end: Callable[[], object]) -> Played:
    target = share.target
    place = asyncio.Semaphore(share.concurrency) if share.concurrency else None
    continued = {request.after for request in share.requests if request.after is not None}
    done: dict[int, asyncio.Future[Outcome]] = {}
    loop = asyncio.get_running_loop()

    async def one(connections: Connections, index: int, request: TracedRequest) -> None:
        prompt: Sequence[int] = request.prompt_ids
        planned = share.start + request.arrival
        if request.after is not None:
            before = await done[request.after]
            prompt = (*prompts[request.after], *before.token_ids, *prompt)
            planned = before.ended + request.arrival
        prompts[index] = prompt
        delay = planned - time.monotonic()
        if delay > 0:
            await asyncio.sleep(delay)
        if place is not None:
            await place.acquire()
        try:
            outcome = Outcome(index, planned, time.monotonic())
            body = target.body(prompt, request.n_output, needs_ids=index in continued)
            await _send(connections, target, body, outcome)
            if index in continued and len(outcome.token_ids) != outcome.n_output:
                # The server does not tell the ids; the next turn then shares the prompt's prefix alone.
                rng = random.Random(index)
                outcome.token_ids = [rng.choice(request.prompt_ids) for _ in range(request.n_output)]
        finally:
            if place is not None:
                place.release()
        if index in done:
            done[index].set_result(outcome)
        outcomes.append(outcome)
        on_end()

    prompts: dict[int, Sequence[int]] = {}
    outcomes: list[Outcome] = []  # not the tasks' results, which asyncio formats for its own messages
    for index in continued:
        done[index] = loop.create_future()
    connections = Connections(target.url, target.headers)
    try:
        cpu, start = time.process_time(), time.monotonic()
        await asyncio.gather(
            *(one(connections, i, request) for i, request in zip(share.indices, share.requests, strict=True))
        )
        return Played(outcomes, time.process_time() - cpu, time.monotonic() - start)
    finally:
        connections.close()


async def _send(connections: Connections, target: Target, body: Mapping[str, Any], outcome: Outcome) -> None:
    """Send one request and fill in its outcome. Never raises for what the server does."""
    path = "/completions" if target.route == "completions" else "/chat/completions"
    answer = _Answer(outcome)
    try:
        async with asyncio.timeout(target.timeout):
            await connections.post(path, json.dumps(body).encode(), answer)
        answer.end()
    except TimeoutError:
        outcome.error = f"no complete answer within {target.timeout:g} seconds"
    except (OSError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARACTERS]
    outcome.ended = time.monotonic()


class _Answer:
    """The reader of one answer: server-sent events until [DONE], or an error's text."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._status = 200
        self._rest = b""  # of an event that has not ended, or the text of an error
        self._is_done = False

    def begin(self, status: int) -> None:
        self._status = status

    def take(self, data: bytes) -> None:
        """Take what arrived. Raises ValueError for an event that is too long or no JSON."""
        now = time.monotonic()
        data = self._rest + data
        if self._status != 200:
            self._rest = data[:_MAX_ERROR_CHARACTERS]
            return
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise ValueError(f"an event of the stream has more than {_MAX_EVENT_BYTES} bytes")
        outcome = self._outcome
        for event in events:
            if event.startswith(b"data: {"):
                if _is_output(event, outcome):
                    outcome.times.append(now)
            elif event.startswith(b"data: [DONE]"):
                self._is_done = True

    def end(self) -> None:
        """The answer is complete. Sets `error` if the stream ended before [DONE], or was refused."""
        outcome = self._outcome
        if self._status != 200:
            outcome.error = f"status {self._status}: {self._rest.decode('utf-8', 'replace')}"
        elif not self._is_done and outcome.error is None:
            outcome.error = "the stream ended before [DONE]"
        if outcome.error is None and not outcome.n_output:
            outcome.n_output = len(outcome.times)  # no usage: a server that sends one token an event


def _is_output(event: bytes, outcome: Outcome) -> bool:
    """Whether an event has output; takes usage, errors and token ids from it.

    Most events have a null finish reason, no usage and no ids, and need not be parsed.
    """
    plain = b'"finish_reason":null' in event or b'"finish_reason": null' in event
    if outcome.times and plain and b'"usage":{' not in event and b'_ids":[' not in event:
        return True
    fields = json.loads(event[6:])
    if "error" in fields:
        outcome.error = str(fields["error"])[:_MAX_ERROR_CHARACTERS]
        return False
    _take_usage(fields, outcome)
    has_output = False
    for choice in fields.get("choices") or ():
        said = choice.get("delta") or {}
        outcome.token_ids += choice.get("token_ids") or ()
        has_output |= bool(
            choice.get("text")
            or said.get("content")
            or said.get("reasoning_content")
            or said.get("reasoning")
            or said.get("tool_calls")
            or choice.get("token_ids")
        )
    return has_output


def _take_usage(fields: Mapping[str, Any], outcome: Outcome) -> None:
    usage = fields.get("usage")
    if usage:
        outcome.n_input = usage.get("prompt_tokens") or 0
        outcome.n_output = usage.get("completion_tokens") or 0
        details = usage.get("prompt_tokens_details") or {}
        outcome.n_cached = details.get("cached_tokens") or 0
