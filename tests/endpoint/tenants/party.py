"""A tenant of a server: random operations over HTTP, gRPC and batches, and what the tenant sees of them.

A view holds only what is the same in each run: ids are replaced by the order in which the tenant met them,
and times are left out. An id that belongs to another tenant is replaced by `ANOTHERS`.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any

import grpc
import httpx2

from orca_jax.request.request import Request
from orca_jax.scheduling.engine_protocol import Iteration, Returned
from orca_jax.simulation.engine import SimulatedEngine, VirtualClock
from server.rpc import generation_pb2 as pb
from server.rpc.generation_pb2_grpc import GenerationStub
from tests.endpoint.harness import MODEL, Server, until
from tests.endpoint.obedient import obedient
from tests.endpoint.openai_client import by_seed
from tests.host.engines import SOON

ANOTHERS = "<another's>"
COMPLETIONS = "/v1/completions"

_BEGINNING = "Once upon a time, in a town by the sea, "
PROMPTS = (
    *("a", "Go", "In the beginning", _BEGINNING),
    *(
        _BEGINNING + end
        for end in ("a ship came in.", "a ship went out.", "nobody slept, and the lamp burned.")
    ),
    _BEGINNING * 3,
)
CHOSEN_IDS = ("order-1", "order-2", "order-3")  # all tenants choose among the same
_ID = re.compile(r"(?:[a-z_]+[-_])?[0-9a-f]{32}(?![0-9a-f])")
_KINDS = ("file", "batch", "resp", "msg")
_ENDED = ("completed", "failed", "cancelled", "expired")


class HeldEngine(SimulatedEngine):
    """An engine without a device whose iterations stay in flight while `gate` is cleared."""

    def __init__(self, token: Callable[[Request, int], int] = by_seed) -> None:
        super().__init__(VirtualClock(), token=obedient(token, MODEL.vocab_size))
        self.gate = threading.Event()
        self.gate.set()

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        assert self.gate.wait(SOON), "the test never opened the gate"
        return super().wait(iteration, interrupted)


class Party:
    """One tenant: its key, what it has made, and `view`, the list of all answers that it got.

    `tried` are the ids of other tenants that it tried. A party that is created with some tries the same ones
    again, in order, instead of ids that `others` have now.
    """

    def __init__(
        self, name: str, key: str, server: Server, stub: GenerationStub, tried: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.view: list[tuple[str, Any]] = []
        self.tried: list[str] = []
        self.others: list[Party] = []
        self.own: dict[str, list[str]] = {kind: [] for kind in _KINDS}
        self._again: Iterator[str] | None = iter(tried) if tried else None
        self._foreign = set(tried)
        self._labels: dict[str, str] = {}
        self._server, self._stub = server, stub
        self._metadata = [("authorization", f"Bearer {key}")]
        self.http = httpx2.Client(
            base_url=server.url,
            timeout=SOON,
            headers={"Authorization": f"Bearer {key}", "X-Api-Key": key, "X-Request-Id": CHOSEN_IDS[0]},
        )

    def note(self, what: str, seen: Any) -> None:
        self.view.append((what, self.normal(seen)))

    def normal(self, value: Any, name: str = "") -> Any:
        """The value without times, and with labels for ids."""
        if name in ("created", "first_id", "last_id") or name.endswith("_at"):
            return None if value is None else "<set>"
        if isinstance(value, str):
            return _ID.sub(lambda found: self._label(found[0]), value)
        if isinstance(value, list | tuple):
            return [self.normal(one) for one in value]
        if isinstance(value, dict):
            found = {key: self.normal(one, key) for key, one in value.items()}
            if found.get("object") == "list" and "has_more" in found:
                # Within a second the order is by random ids.
                found["data"].sort(key=lambda one: str(one["id"]))
            return found
        return value

    def knows(self, one: str) -> bool:
        return one in self._labels

    def _label(self, one: str) -> str:
        if one not in self._labels:
            if one in self._foreign or any(other.knows(one) for other in self.others):
                return ANOTHERS
            self._labels[one] = f"<{len(self._labels)}>"
            kind = one[:-33]
            if kind in self.own:
                self.own[kind].append(one)
        return self._labels[one]

    def pick(self, kind: str, draw: Random) -> str:
        """An id of `kind`: half the time of its own, half of another tenant's."""
        of_others, place = draw.random() < 0.5, draw.random()
        if of_others:
            if self._again is not None:
                one = next(self._again)
            else:
                known = [one for other in self.others for one in other.own[kind]]
                recent = known[-40:]
                one = recent[int(place * len(recent))] if recent else f"{kind}-{'0' * 32}"
            self.tried.append(one)
            self._foreign.add(one)
            return one
        recent = self.own[kind][-8:]
        return recent[int(place * len(recent))] if recent else f"{kind}_none"

    def ask(self, what: str, method: str, path: str, **more: Any) -> Any:
        """Send a request and note the answer, a stream as its joined parts."""
        response = self.http.request(method, path, **more)
        kind = response.headers.get("content-type", "")
        if kind.startswith("text/event-stream"):
            seen: Any = joined(response.text)
        elif kind.startswith("application/json"):
            seen = response.json()
        else:
            seen = lines(response.text)
        self.note(what, [response.status_code, response.headers.get("x-request-id"), seen])
        return seen

    # One method for each kind of operation; `draw` gives the same choices in each run.

    def begin_with(self, draw: Random) -> None:
        """Make one of each kind of resource that others may try to reach."""
        for _ in range(2):  # the second finds the first one's prompt in the cache, and no other tenant's
            self.ask(
                "completion", "POST", COMPLETIONS, json={"prompt": PROMPTS[-1], "max_tokens": 2, "seed": 1}
            )
        self.end_of_batch(self.begin_batch(self.upload_lines(draw, 2)))
        self.ask(
            "response new", "POST", "/v1/responses", json={"input": "Hi", "max_output_tokens": 2, "seed": 1}
        )

    def completion(self, draw: Random) -> None:
        body = {**self._sampling(draw), "prompt": draw.choice(PROMPTS), "n": draw.choice((1, 1, 2))}
        self.ask("completion", "POST", COMPLETIONS, json=body | self._stream(draw))

    def chat(self, draw: Random) -> None:
        messages = [{"role": "user", "content": draw.choice(PROMPTS)}]
        body = {**self._sampling(draw), "messages": messages}
        self.ask("chat", "POST", "/v1/chat/completions", json=body | self._stream(draw))

    def message(self, draw: Random) -> None:
        body = {
            "model": "test",
            "max_tokens": 3,
            "messages": [{"role": "user", "content": draw.choice(PROMPTS)}],
        }
        body["seed"] = draw.randrange(3)
        self.ask("message", "POST", "/v1/messages", json=body)

    def response(self, draw: Random) -> None:
        body: dict[str, Any] = {
            "input": draw.choice(PROMPTS),
            "max_output_tokens": 4,
            "seed": draw.randrange(3),
        }
        how = draw.choice(("new", "after", "after", "item", "unstored"))
        body["stream"] = draw.random() < 0.3
        if how == "after":
            body["previous_response_id"] = self.pick("resp", draw)
        elif how == "item":
            body["input"] = [
                {"type": "item_reference", "id": self.pick("msg", draw)},
                {"role": "user", "content": "x"},
            ]
        elif how == "unstored":
            body["store"] = False
        self.ask(f"response {how}", "POST", "/v1/responses", json=body)

    def stored_response(self, draw: Random) -> None:
        method, end = draw.choice((("GET", ""), ("GET", ""), ("GET", "/input_items"), ("DELETE", "")))
        one = self.pick("resp", draw)
        self.ask(f"stored response {method}{end}", method, f"/v1/responses/{one}{end}")

    def upload(self, draw: Random) -> None:
        self.upload_lines(draw, draw.randrange(4))

    def file(self, draw: Random) -> None:
        method, end = draw.choice((("GET", ""), ("GET", "/content"), ("DELETE", "")))
        self.ask(f"file {method}{end}", method, f"/v1/files/{self.pick('file', draw)}{end}")

    def files(self, draw: Random) -> None:
        self.ask("files", "GET", "/v1/files")
        query = {"after": self.pick("file", draw), "limit": 1}
        response = self.http.get("/v1/files", params=query)
        error = response.json().get("error")  # the page itself depends on the order of random ids
        self.note("files after", [response.status_code, error])

    def batches(self, draw: Random) -> None:
        self.ask("batches", "GET", "/v1/batches", params={"limit": 10_000})
        response = self.http.get("/v1/batches", params={"after": self.pick("batch", draw), "limit": 1})
        self.note("batches after", [response.status_code, response.json().get("error")])

    def batch(self, draw: Random) -> None:
        method, end = draw.choice((("GET", ""), ("POST", "/cancel")))
        self.ask(f"batch {method}{end}", method, f"/v1/batches/{self.pick('batch', draw)}{end}")

    def new_batch(self, draw: Random) -> None:
        """Run a batch to its end, and read its files."""
        file_id = (
            self.upload_lines(draw, 1 + draw.randrange(3)) if draw.random() < 0.7 else self.pick("file", draw)
        )
        self.end_of_batch(self.begin_batch(file_id))

    def begin_batch(self, file_id: str) -> str | None:
        body = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
        return self.ask("new batch", "POST", "/v1/batches", json=body).get("id")

    def end_of_batch(self, batch_id: str | None) -> None:
        if batch_id is None:
            return
        path = f"/v1/batches/{batch_id}"
        until(lambda: self.http.get(path).json()["status"] in _ENDED, "the batch's end")
        batch = self.ask("batch's end", "GET", path)
        for kind in ("output", "error"):
            if file_id := batch[f"{kind}_file_id"]:
                self.ask(f"batch's {kind}", "GET", f"/v1/files/{file_id}/content")

    def tokens(self, draw: Random) -> None:
        text = draw.choice(PROMPTS)
        self.ask("tokenize", "POST", "/tokenize", json={"prompt": text})
        self.ask("detokenize", "POST", "/detokenize", json={"tokens": list(text.encode())})

    def relevance(self, draw: Random) -> None:
        first, second = draw.choice(PROMPTS), draw.choice(PROMPTS)
        self.ask("embeddings", "POST", "/v1/embeddings", json={"input": first})
        self.ask("score", "POST", "/v1/score", json={"text_1": first, "text_2": second})

    def models(self, draw: Random) -> None:
        path = draw.choice(("/v1/models", "/v1/models/test", "/v1/models/other", "/v1/other", "/admin/state"))
        self.ask("models", "GET", path)

    def generate(self, draw: Random) -> None:
        """Make a whole call under an id that others choose too, and try to end it after its end."""
        request = self.named(draw.choice(CHOSEN_IDS), draw.choice(PROMPTS), n=draw.choice((1, 1, 2)))
        self.note("generate", outcome(self.begin(request)))
        self.cancel(request.request_id)

    def cancel(self, one: str) -> None:
        self.note("cancel", self.found(one))

    def ids(self, draw: Random) -> None:
        """Try to end requests by the ids of responses, files and batches."""
        for kind in _KINDS:
            self.cancel(self.pick(kind, draw))

    def named(self, request_id: str, prompt: str, *, n: int = 1) -> pb.GenerateRequest:
        sampling = pb.SamplingParams(max_tokens=5, ignore_eos=True, seed=7, n=n)
        return pb.GenerateRequest(text=prompt, request_id=request_id, sampling=sampling)

    def begin(self, request: pb.GenerateRequest) -> Any:
        """Begin a call; return when it has been accepted or refused."""
        call = self._stub.Generate(request, metadata=self._metadata, timeout=SOON)
        call.initial_metadata()
        return call

    def found(self, one: str) -> bool:
        return self._stub.Cancel(
            pb.CancelRequest(request_id=one), metadata=self._metadata, timeout=SOON
        ).found

    def begin_stream(self, threads: ThreadPoolExecutor) -> Future[Any]:
        """Begin a stream over HTTP, which has no output while the engine is held."""
        body = {"prompt": "st", "max_tokens": 5, "ignore_eos": True, "seed": 5, "stream": True}
        n_before = self._server.gateway.n_live
        future = threads.submit(lambda: self.http.post(COMPLETIONS, json=body))
        until(lambda: self._server.gateway.n_live > n_before, "the stream's request")
        return future

    def upload_lines(self, draw: Random, n_lines: int, *, wrong: float = 0.2) -> str:
        body = {"prompt": "ab", "max_tokens": 3}
        content = "".join(
            json.dumps(
                {
                    "custom_id": f"line {i}",
                    "method": "POST",
                    "url": COMPLETIONS,
                    "body": body
                    | {"seed": draw.randrange(3)}
                    | ({} if draw.random() >= wrong else {"max_tokens": -1}),
                }
            )
            + "\n"
            for i in range(n_lines)
        )
        file = {"file": ("input.jsonl", content.encode())}
        return self.ask("upload", "POST", "/v1/files", files=file, data={"purpose": "batch"})["id"]

    def _sampling(self, draw: Random) -> dict[str, Any]:
        return {"max_tokens": 1 + draw.randrange(6), "seed": draw.randrange(3), "ignore_eos": True}

    def _stream(self, draw: Random) -> dict[str, Any]:
        return {"stream": True, "stream_options": {"include_usage": True}} if draw.random() < 0.5 else {}


OPERATIONS: tuple[Callable[[Party, Random], None], ...] = (
    *(Party.completion, Party.chat, Party.message, Party.response, Party.response, Party.stored_response),
    *(Party.upload, Party.file, Party.file, Party.files, Party.batches, Party.batch, Party.new_batch),
    *(Party.tokens, Party.relevance, Party.models, Party.generate, Party.generate, Party.ids),
)


def joined(text: str) -> Any:
    """The events of a stream, independent of how its text is divided into chunks."""
    events = [json.loads(line[5:]) for line in text.splitlines() if line.startswith("data: {")]
    if responses := [event["response"] for event in events if "response" in event]:
        return responses[-1]
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for event in events:
        for choice in event.get("choices", ()):
            i = choice["index"]
            texts[i] = texts.get(i, "") + (choice.get("text") or choice.get("delta", {}).get("content") or "")
            if choice["finish_reason"] is not None:
                ends[i] = choice["finish_reason"]
    errors = [event["error"] for event in events if "error" in event]
    usages = [event["usage"] for event in events if event.get("usage")]
    choices = [(texts[i], ends.get(i)) for i in sorted(texts)]
    return {"id": events[0].get("id"), "choices": choices, "errors": errors, "usages": usages}


def lines(text: str) -> Any:
    """The parsed lines of a JSON Lines file, or any other text as it is."""
    try:
        return [json.loads(line) for line in text.splitlines()]
    except ValueError:
        return text


def outcome(call: Any) -> Any:
    """The status of a call, and its output if it was not cancelled."""
    texts: dict[int, str] = {}
    ends: list[tuple[int, int]] = []
    cached = 0
    try:
        for message in call:
            texts[message.index] = texts.get(message.index, "") + message.text
            if message.finish_reason:
                ends.append((message.index, message.finish_reason))
                cached += message.usage.cached_tokens
    except grpc.RpcError:
        return [call.code().name, call.details()]
    return [call.code().name, sorted(texts.items()), sorted(ends), cached]
