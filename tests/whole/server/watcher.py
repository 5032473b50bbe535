"""A tenant that repeats the same requests: with other tenants it must see the same as alone."""

import json
import re
import threading
from typing import Any

import grpc
import httpx2

from server.rpc import generation_pb2 as pb
from server.rpc.generation_pb2_grpc import GenerationStub
from tests.endpoint.harness import Server, until
from tests.endpoint.tenants.party import joined

SOON = 60.0
REQUEST_ID = "order-17"  # of its gRPC calls; others try it too
PROMPT = "In the beginning"
N_OUTPUT = 16
N_LONG = 240  # of a call that others have time to touch

_ID = re.compile(r"(?:[a-z_]+[-_])?[0-9a-f]{32}(?![0-9a-f])")
_PASSING = re.compile(
    r'"(created|created_at|cached_tokens|completed_at|expires_at)": ?\d+'
)  # times, the cache


class Watcher:
    """A context manager: inside it one round follows the other, on a thread. `wrong` has what differed.

    `n` counts the rounds. The first two, before any other, are what the tenant sees alone.
    """

    def __init__(self, server: Server, key: str, request_id: str = REQUEST_ID) -> None:
        self.n = 0
        self.wrong: list[str] = []
        self._request_id = request_id
        self._headers = {"Authorization": f"Bearer {key}", "X-Request-Id": request_id}
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watcher")

    def __enter__(self) -> "Watcher":
        self._http = httpx2.Client(base_url=self._server.url, headers=self._headers, timeout=SOON)
        self._channel = grpc.insecure_channel(self._server.grpc_address)
        self._stub = GenerationStub(self._channel)
        self._alone = self.round()
        assert self.round() == self._alone, "it is not the same even alone"
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(SOON)
        self._channel.close()
        self._http.close()

    def finish(self) -> None:
        """Wait for the end of one more whole round, or for the first difference."""
        n = self.n
        until(lambda: self.n > n + 1 or bool(self.wrong), "one more round")

    def _watch(self) -> None:
        while not self._over.wait(0.05) and not self.wrong:
            try:
                seen = self.round()
            except Exception as error:
                self.wrong.append(repr(error))
                return
            self.n += 1
            self.wrong += [
                f"{now} instead of {alone}"
                for now, alone in zip(seen, self._alone, strict=True)
                if now != alone
            ]

    def round(self) -> list[str]:
        """One round: the watcher's view of one request of each kind, without ids and times."""
        return [
            *self._completions(),
            *self._stored(),
            *self._files(),
            *self._calls(),
            self._ask("GET", "/v1/models"),
            self._ask("POST", "/tokenize", json={"prompt": PROMPT}),
        ]

    def _completions(self) -> list[str]:
        body = {"prompt": PROMPT, "max_tokens": N_OUTPUT, "temperature": 0, "ignore_eos": True}
        stream = self._http.post("/v1/completions", json={**body, "stream": True})
        plain = self._ask("POST", "/v1/completions", json=body)
        return [plain, f"{stream.status_code} {normal(joined(stream.text))}"]

    def _stored(self) -> list[str]:
        body = {"input": PROMPT, "max_output_tokens": 4, "temperature": 0}
        made = self._http.post("/v1/responses", json=body)
        path = f"/v1/responses/{made.json()['id']}"
        asked = [self._ask(method, path) for method in ("GET", "DELETE", "GET")]
        return [f"{made.status_code} {normal(made.json())}", *asked]

    def _files(self) -> list[str]:
        form = {"files": {"file": ("a.jsonl", b"mine\n")}, "data": {"purpose": "batch"}}
        path = f"/v1/files/{self._http.post('/v1/files', **form).json()['id']}"
        return [
            self._ask("GET", "/v1/files"),
            self._ask("GET", f"{path}/content"),
            self._ask("DELETE", path),
            self._ask("GET", "/v1/files"),
            self._ask("GET", "/v1/batches"),
        ]

    def _calls(self) -> list[str]:
        metadata = [("authorization", self._headers["Authorization"])]
        sampling = pb.SamplingParams(max_tokens=N_LONG, temperature=0, ignore_eos=True)
        request = pb.GenerateRequest(text=PROMPT, request_id=self._request_id, sampling=sampling)
        messages = list(self._stub.Generate(request, metadata=metadata, timeout=SOON))
        cancel = pb.CancelRequest(request_id=self._request_id)
        embed = pb.EmbedRequest(inputs=[pb.EmbedInput(text=PROMPT)])
        vector = self._stub.Embed(embed, metadata=metadata, timeout=SOON).embeddings[0].values
        return [
            # The beginning alone: among so many tokens two may be equally likely, and then other rows decide.
            "".join(message.text for message in messages)[:N_OUTPUT],
            str(sum(len(message.token_ids) for message in messages)),
            str(messages[-1].finish_reason),
            str(self._stub.Cancel(cancel, metadata=metadata, timeout=SOON).found),
            # Not to the last bit: how many rows run together changes how products are summed.
            str([round(value, 3) + 0.0 for value in vector[:8]]),
        ]

    def _ask(self, method: str, path: str, **more: Any) -> str:
        response = self._http.request(method, path, **more)
        return f"{method} {response.status_code} {normal(response.text)}"


def normal(seen: Any) -> str:
    """Text or JSON without ids, times and counts of cached tokens."""
    text = seen if isinstance(seen, str) else json.dumps(seen)
    return _ID.sub("<id>", _PASSING.sub(r'"\1": 0', text))
