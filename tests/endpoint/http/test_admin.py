"""The operator's routes, which exist only with an admin key: new weights, sleep and pause."""

import json
import socket
import threading
from typing import Any

import httpx2
import pytest

from server.settings.api_keys import ApiKeys
from tests.endpoint.harness import serving, until
from tests.endpoint.http_client import connected
from tests.host.engines import SOON, FakeMemory, PacedEngine

ADMIN = {"Authorization": "Bearer admin-key-1"}
USER = {"Authorization": "Bearer user-key-1"}
KEYS: dict[str, Any] = {"keys": ApiKeys(["user-key-1"]), "admin_keys": ApiKeys(["admin-key-1"])}
BODY = {"prompt": "a", "max_tokens": 4, "ignore_eos": True}


def test_without_an_admin_key_there_are_no_routes() -> None:
    with serving() as server, connected(server) as client:
        for path in ("state", "update_weights", "sleep", "wake_up", "pause", "resume"):
            assert client.post(f"/admin/{path}", json={}, headers=ADMIN).status_code == 404
        assert "/admin/state" not in client.get("/openapi.json").json()["paths"]
        (choice,) = client.post("/v1/completions", json=BODY).json()["choices"]
        assert "weights_version" not in choice


def test_keys_open_their_own_routes_only() -> None:
    with serving(memory=FakeMemory(), **KEYS) as server, connected(server) as client:
        for headers in ({}, USER, {"Authorization": "Bearer admin-key-2"}):
            response = client.get("/admin/state", headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert client.post("/v1/completions", json=BODY, headers=ADMIN).status_code == 401
        state = client.get("/admin/state", headers=ADMIN).json()
        assert state == {"weights_version": 0, "paused": False, "asleep": 0}


def post(client: httpx2.Client, path: str, **body: object) -> tuple[int, dict]:
    response = client.post(f"/admin/{path}", json=body, headers=ADMIN)
    return response.status_code, response.json()


def test_new_weights_and_their_version_in_every_output() -> None:
    memory = FakeMemory()
    with serving(memory=memory, **KEYS) as server, connected(server) as client:

        def versions(path: str, body: dict) -> list[int]:
            answer = client.post(path, json=body, headers=USER).json()
            assert all(list(choice)[-1] == "weights_version" for choice in answer["choices"])
            return [choice["weights_version"] for choice in answer["choices"]]

        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        assert versions("/v1/completions", {**BODY, "n": 2}) == [0, 0]
        assert post(client, "update_weights", directory="/new") == (
            200,
            {"weights_version": 1, "paused": False, "asleep": 0},
        )
        assert memory.weights == "/new"
        assert post(client, "update_weights", directory="/newer", version=5)[1]["weights_version"] == 5
        assert versions("/v1/completions", {**BODY, "echo": True, "max_tokens": 0}) == [5]
        assert versions("/v1/chat/completions", chat) == [5]
        stream = client.post("/v1/completions", json={**BODY, "n": 2, "stream": True}, headers=USER).text
        events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
        choices = [json.loads(event)["choices"][0] for event in events]
        assert [choice.get("weights_version") for choice in choices if choice["finish_reason"]] == [5, 5]
        assert not [
            choice for choice in choices if "weights_version" in choice and not choice["finish_reason"]
        ]


def test_mistakes_are_errors_that_name_them() -> None:
    memory = FakeMemory()
    with serving(memory=memory, **KEYS) as server, connected(server) as client:
        status, answer = post(client, "update_weights", directory="wrong")
        assert (status, answer["error"]["code"]) == (400, "weights")
        assert "has the shape [3], expected [4]" in answer["error"]["message"]
        for body, param in (
            ({}, "directory"),
            ({"directory": "a", "running": "later"}, "running"),
            ({"directory": "a", "version": 0}, "version"),
            ({"directory": "a", "timeout": 0}, "timeout"),
            ({"directory": "a", "other": 1}, "other"),
        ):
            status, answer = post(client, "update_weights", **body)
            assert (status, answer["error"]["param"]) == (400, param), body
        assert post(client, "update_weights", directory="a\0b")[0] == 400
        assert post(client, "sleep", level=3)[1]["error"]["param"] == "level"
        assert memory.done == []
        assert post(client, "update_weights", directory="a", version=3)[0] == 200
        status, answer = post(client, "update_weights", directory="a", version=3)
        assert (status, answer["error"]["message"]) == (
            400,
            "version is 3, and the engine has version 3; give a later one",
        )


def test_pause_and_sleep() -> None:
    with serving(memory=FakeMemory(), **KEYS) as server, connected(server) as client:
        assert post(client, "pause")[1]["paused"] is True
        assert client.get("/ready").json()["status"] == "paused"
        answers = list[httpx2.Response]()

        def ask() -> None:
            with connected(server) as other:
                answers.append(other.post("/v1/completions", json=BODY, headers=USER))

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: server.service.pool.n_waiting == 1, "the request")
        assert client.post("/admin/resume", headers=ADMIN).json()["paused"] is False
        asking.join(SOON)
        assert answers[0].status_code == 200
        assert post(client, "sleep", level=2)[1]["asleep"] == 2
        response = client.get("/ready")
        assert (response.status_code, response.json()["status"]) == (503, "asleep")
        response = client.post("/v1/completions", json=BODY, headers=USER)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "asleep")
        assert post(client, "wake_up")[1]["asleep"] == 0
        assert client.post("/v1/completions", json=BODY, headers=USER).status_code == 200
        assert client.get("/ready").json() == {"status": "ready"}


class _SlowMemory(FakeMemory):
    """A memory that reports when an update has begun, and waits before it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.go = threading.Event(), threading.Event()

    def _install(self, weights: object) -> None:
        self.began.set()
        assert self.go.wait(SOON)
        super()._install(weights)


@pytest.mark.parametrize("lacks", [1, 0], ids=["before its request is whole", "after it"])
def test_a_trainer_that_dies_has_updated_if_its_request_was_whole(lacks: int) -> None:
    memory = _SlowMemory()
    body = json.dumps({"directory": "/new"}).encode()
    lines = ("POST /admin/update_weights HTTP/1.1", "Host: a", f"Authorization: {ADMIN['Authorization']}")
    lines += ("Content-Type: application/json", f"Content-Length: {len(body)}", "", "")
    with serving(memory=memory, **KEYS) as server, connected(server) as client:
        url = httpx2.URL(server.url)
        with socket.create_connection((url.host, url.port or 80)) as trainer:
            trainer.sendall("\r\n".join(lines).encode() + body[: len(body) - lacks])
            assert lacks or memory.began.wait(SOON)
        memory.go.set()
        version = 1 - lacks
        until(lambda: server.service.scheduler.weights_version == version, "the update")
        assert client.get("/admin/state", headers=ADMIN).json()["weights_version"] == version
        assert memory.weights == ("first" if lacks else "/new") and memory.began.is_set() == (not lacks)


@pytest.mark.parametrize("running", ["finish", "abort"])
def test_running_requests_continue_or_end_as_asked(running: str) -> None:
    engine = PacedEngine(seconds=0.1)
    with serving(engine=engine, memory=FakeMemory(), **KEYS) as server, connected(server) as client:
        long = {**BODY, "max_tokens": 60, "stream": True}
        with client.stream("POST", "/v1/completions", json=long, headers=USER) as stream:
            chunks = stream.iter_bytes()
            first = next(chunks)
            with connected(server) as other:
                if running == "finish":
                    status, answer = post(other, "update_weights", directory="a", timeout=0.05)
                    assert (status, answer["error"]["code"]) == (409, "requests_running")
                    engine.seconds = 0.001
                assert post(other, "update_weights", directory="b", running=running)[0] == 200
            rest = (first + b"".join(chunks)).decode()
        if running == "finish":
            assert '"weights_version":0' in rest and "[DONE]" in rest
        else:
            assert "the request was cancelled" in rest and "[DONE]" not in rest
