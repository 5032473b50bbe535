"""Access rights: every HTTP route and gRPC method, by the owner's key, another key, an admin key and none.

A route or a method without a row in the table fails its test.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from fastapi import FastAPI
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from server.http import app as app_module
from server.rpc import generation_pb2 as pb
from server.rpc.generation_pb2_grpc import GenerationStub
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import Server, serving, until
from tests.endpoint.http_client import connected
from tests.endpoint.tenants.party import HeldEngine
from tests.host.engines import SOON, FakeMemory

OWN, OTHER, ADMIN = "own-tenant-key", "other-tenant-key", "admin-operator-key"
WHO = {"none": None, "admin": ADMIN, "other": OTHER, "own": OWN}  # the owner last: it may delete things

OPEN = (200, 200, 200, 200)  # by no key, an admin key, another key and the owner's
ANY_KEY = (401, 401, 200, 200)
OWNER = (401, 401, 404, 200)  # to others it is not there
OPERATOR = (401, 200, 401, 401)
NOT_FOUND = (401, 401, 404, 404)
GENERATE: dict[str, Any] = {"max_tokens": 2, "seed": 1}
CHAT = {"model": "test", "messages": [{"role": "user", "content": "a"}], **GENERATE}


@dataclass(frozen=True)
class Row:
    """A route's answers, in the order of `WHO`, and its request body."""

    statuses: tuple[int, int, int, int]
    json: Any = None


ROUTES: dict[tuple[str, str], Row] = {
    ("POST", "/v1/completions"): Row(ANY_KEY, {"prompt": "a", **GENERATE}),
    ("POST", "/v1/chat/completions"): Row(ANY_KEY, CHAT),
    ("POST", "/v1/messages"): Row(ANY_KEY, CHAT),
    ("POST", "/v1/messages/count_tokens"): Row(ANY_KEY, {"model": "test", "messages": CHAT["messages"]}),
    ("POST", "/v1/responses"): Row(ANY_KEY, {"input": "a"}),
    ("GET", "/v1/responses/{response_id}"): Row(OWNER),
    ("GET", "/v1/responses/{response_id}/input_items"): Row(OWNER),
    ("DELETE", "/v1/responses/{response_id}"): Row(OWNER),
    ("POST", "/v1/embeddings"): Row(ANY_KEY, {"input": "a"}),
    ("POST", "/v1/score"): Row(ANY_KEY, {"text_1": "a", "text_2": "b"}),
    ("POST", "/v1/rerank"): Row(ANY_KEY, {"query": "a", "documents": ["b"]}),
    ("POST", "/score"): Row(ANY_KEY, {"text_1": "a", "text_2": "b"}),
    ("POST", "/rerank"): Row(ANY_KEY, {"query": "a", "documents": ["b"]}),
    ("GET", "/v1/models"): Row(ANY_KEY),
    ("GET", "/v1/models/{model_id:path}"): Row(ANY_KEY),
    ("POST", "/tokenize"): Row(ANY_KEY, {"prompt": "a"}),
    ("POST", "/detokenize"): Row(ANY_KEY, {"tokens": [97]}),
    ("POST", "/v1/files"): Row(ANY_KEY),
    ("GET", "/v1/files"): Row(ANY_KEY),
    ("GET", "/v1/files/{file_id}"): Row(OWNER),
    ("GET", "/v1/files/{file_id}/content"): Row(OWNER),
    ("DELETE", "/v1/files/{file_id}"): Row(OWNER),
    ("POST", "/v1/batches"): Row(
        OWNER, {"input_file_id": "{file_id}", "endpoint": "/v1/completions", "completion_window": "24h"}
    ),
    ("GET", "/v1/batches"): Row(ANY_KEY),
    ("GET", "/v1/batches/{batch_id}"): Row(OWNER),
    ("POST", "/v1/batches/{batch_id}/cancel"): Row((401, 401, 404, 400)),  # it has ended
    ("GET", "/live/events"): Row(ANY_KEY),
    ("GET", "/live/files/{name}"): Row((401, 401, 403, 403)),  # a recording has everybody's prompts
    ("GET", "/admin/state"): Row(OPERATOR),
    ("POST", "/admin/update_weights"): Row(OPERATOR, {"directory": "/new"}),
    ("POST", "/admin/sleep"): Row(OPERATOR, {}),
    ("POST", "/admin/wake_up"): Row(OPERATOR, {}),
    ("POST", "/admin/pause"): Row(OPERATOR, {}),
    ("POST", "/admin/resume"): Row(OPERATOR),
    # This engine has no room for adapters.
    ("POST", "/v1/load_lora_adapter"): Row((401, 400, 401, 401), {"lora_name": "a", "lora_path": "/a"}),
    ("POST", "/v1/unload_lora_adapter"): Row((401, 400, 401, 401), {"lora_name": "a"}),
    **{
        (method, path): Row(OPEN)
        for path in ("/health", "/ready", "/", "/live", "/docs", "/static/{name:path}")
        for method in ("GET", "HEAD")
    },
    ("GET", "/version"): Row(OPEN),
    ("GET", "/metrics"): Row(OPEN),
    ("GET", "/openapi.json"): Row(OPEN),
    ("HEAD", "/openapi.json"): Row(OPEN),
}
NOT_ROUTES = {  # without a row, for there is no such route
    ("GET", "/v1/nothing"): NOT_FOUND,
    ("GET", "/admin/nothing"): (401, 404, 401, 401),
    ("GET", "/admin/%2e%2e/v1/files"): (401, 404, 401, 401),
    ("GET", "/v1/files/"): NOT_FOUND,
    ("GET", "/live/"): NOT_FOUND,
    ("GET", "/health/"): NOT_FOUND,
    ("GET", "/static"): NOT_FOUND,
    ("GET", "/static/%2e%2e/v1/models"): (404, 404, 404, 404),
    ("GET", "/health/%2e%2e/v1/models"): NOT_FOUND,
}
# On a server without --batch-dir these say how to turn them on.
OFF = {
    (method, path + end)
    for path in ("/v1/files", "/v1/batches")
    for end in ("", "/{rest:path}")
    for method in ("GET", "POST", "DELETE")
}

NEEDS_KEY = ("UNAUTHENTICATED", "UNAUTHENTICATED", "OK", "OK")
METHODS: dict[str, tuple[str, str, str, str]] = {
    "orca.v1.Generation/Generate": NEEDS_KEY,
    "orca.v1.Generation/Cancel": NEEDS_KEY,
    "orca.v1.Generation/Embed": NEEDS_KEY,
    "orca.v1.Generation/Models": NEEDS_KEY,
    "grpc.health.v1.Health/Check": ("OK", "OK", "OK", "OK"),
    "grpc.health.v1.Health/List": ("OK", "OK", "OK", "OK"),
    "grpc.health.v1.Health/Watch": ("OK", "OK", "OK", "OK"),
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": ("OK", "OK", "OK", "OK"),
}


@pytest.fixture
def apps(monkeypatch: pytest.MonkeyPatch) -> list[FastAPI]:
    """A list that collects the applications created from now on, without their middleware."""
    made: list[FastAPI] = []
    handle_errors = app_module.handle_errors

    def handle(app: FastAPI) -> None:
        made.append(app)
        handle_errors(app)

    monkeypatch.setattr(app_module, "handle_errors", handle)
    return made


def routes_of(routes: Any) -> set[tuple[str, str]]:
    """Method and path of each route, those of included routers too, which FastAPI keeps whole."""
    found: set[tuple[str, str]] = set()
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is not None:
            found |= routes_of(included.routes)
        else:  # a mounted application or a WebSocket has no methods, and so fails here
            found |= {(method, route.path) for method in route.methods}
    return found


@pytest.fixture
def server(tmp_path: Path, apps: list[FastAPI]) -> Iterator[Server]:
    """A server of two tenants and an operator, with files, batches and a recording."""
    recording = tmp_path / "recorded.jsonl"
    recording.write_text("{}\n")
    options = EndpointOptions(port=0, grpc_port=0, access_log="off", batch_dir=tmp_path / "batches")
    with serving(
        engine=HeldEngine(),
        options=options,
        keys=ApiKeys([OWN, OTHER]),
        admin_keys=ApiKeys([ADMIN]),
        memory=FakeMemory(),
        recording=recording,
    ) as server:
        yield server


def headers_of(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def things_of(server: Server) -> dict[str, str]:
    """Values for the path parameters: the owner's response, file, and ended batch."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", **GENERATE}}
    with httpx2.Client(base_url=server.url, headers=headers_of(OWN), timeout=SOON) as client:
        form: Any = {"files": {"file": ("a", json.dumps(line).encode())}, "data": {"purpose": "batch"}}
        file_id = client.post("/v1/files", **form).json()["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch_id = client.post("/v1/batches", json=body).json()["id"]
        batch = f"/v1/batches/{batch_id}"
        until(lambda: client.get(batch).json()["status"] == "completed", "the batch's end")
        response_id = client.post("/v1/responses", json={"input": "a", "max_output_tokens": 2}).json()["id"]
    ids = {"{response_id}": response_id, "{file_id}": file_id, "{batch_id}": batch_id}
    return {**ids, "{model_id:path}": "test", "{rest:path}": "x"}


def filled(path: str, things: dict[str, str]) -> str:
    for name, value in things.items():
        path = path.replace(name, value)
    return path.replace("{name:path}", "theme.js").replace("{name}", "recorded.jsonl")


def answer(
    client: httpx2.Client, key: str | None, method: str, path: str, body: Any = None
) -> tuple[int, str]:
    """The status, and the text unless it is a stream that does not end."""
    more: dict[str, Any] = {} if body is None else {"json": body}
    if (method, path) == ("POST", "/v1/files"):
        more = {"files": {"file": ("a", b"{}")}, "data": {"purpose": "batch"}}
    with client.stream(method, path, headers=headers_of(key), **more) as response:
        if path == "/live/events" and response.status_code == 200:
            return 200, next(response.iter_text())
        response.read()
        return response.status_code, response.text


def test_every_route_by_every_key(server: Server, client: httpx2.Client, apps: list[FastAPI]) -> None:
    (app,) = apps
    assert routes_of(app.routes) == set(ROUTES), "each route has a row here, and each row is of a route"
    things = things_of(server)
    for (method, path), row in ROUTES.items():
        body = row.json and json.loads(filled(json.dumps(row.json), things))
        found = tuple(answer(client, key, method, filled(path, things), body)[0] for key in WHO.values())
        assert found == row.statuses, (method, path)
        if method == "DELETE":
            things = things_of(server)
    for (method, path), statuses in NOT_ROUTES.items():
        found = tuple(answer(client, key, method, path)[0] for key in WHO.values())
        assert found == statuses, (method, path)


def test_another_s_thing_is_answered_as_one_that_is_not_there(server: Server, client: httpx2.Client) -> None:
    """The answers are equal word for word, so that nobody can find out what others have."""
    things = things_of(server)
    nothing = {name: re.sub("[0-9a-f]{32}", "0" * 32, one) for name, one in things.items()}
    for (method, path), row in ROUTES.items():
        if 404 not in row.statuses:
            continue
        texts: list[str] = []
        for given in (things, nothing):
            body = row.json and json.loads(filled(json.dumps(row.json), given))
            status, text = answer(client, OTHER, method, filled(path, given), body)
            assert status == 404
            texts.append(re.sub("[0-9a-f]{32}", "", text))
        assert texts[0] == texts[1], (method, path)


def test_the_live_view_names_nobody_s_requests(server: Server, client: httpx2.Client) -> None:
    engine = server.service.scheduler.engine
    assert isinstance(engine, HeldEngine)
    request = pb.GenerateRequest(text="a", request_id="order-17", sampling=pb.SamplingParams(max_tokens=2))
    engine.gate.clear()
    with grpc.insecure_channel(server.grpc_address) as channel:
        metadata = [("authorization", f"Bearer {OWN}")]
        call = GenerationStub(channel).Generate(request, metadata=metadata, timeout=SOON)
        try:
            call.initial_metadata()
            for key in (OWN, OTHER):
                _, hello = answer(client, key, "GET", "/live/events")
                assert '"requests":[{' in hello and '"shows_ids":false' in hello and "order-17" not in hello
            for path in ("/metrics", "/ready", "/openapi.json"):
                assert "order-17" not in answer(client, None, "GET", path)[1]
        finally:
            engine.gate.set()
        list(call)


def test_without_a_folder_the_routes_of_batches_are_off_for_all(apps: list[FastAPI]) -> None:
    options = EndpointOptions(port=0, grpc_port=None, access_log="off")
    keys: Any = {"keys": ApiKeys([OWN, OTHER]), "admin_keys": ApiKeys([ADMIN])}
    with serving(options=options, **keys) as server, connected(server) as client:
        (app,) = apps
        off = routes_of(app.routes) - set(ROUTES)
        assert off == OFF - set(ROUTES)
        for method, path in OFF:
            path = path.replace("{rest:path}", "x")
            assert tuple(answer(client, key, method, path)[0] for key in WHO.values()) == NOT_FOUND


def test_every_method_by_every_key(server: Server) -> None:
    requests: dict[str, Any] = {
        "Generate": pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=2)),
        "Embed": pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")]),
        "ServerReflectionInfo": reflection_pb2.ServerReflectionRequest(list_services=""),
    }
    files = [pb.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR]
    known = {service.full_name: service for file in files for service in file.services_by_name.values()}
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub: Any = ServerReflectionStub(channel)
        (listed,) = stub.ServerReflectionInfo(iter([requests["ServerReflectionInfo"]]), timeout=SOON)
        services = [service.name for service in listed.list_services_response.service]
        methods = {f"{name}/{method.name}" for name in services for method in known[name].methods}
        assert methods == set(METHODS), "each method has a row here, and each row is of a method"
        for method, expected in METHODS.items():
            request = requests.get(
                method.rpartition("/")[2], pb.ModelsRequest()
            )  # no fields: fits all others
            found = tuple(status_of(channel, method, request, key) for key in WHO.values())
            assert found == expected, method


def status_of(channel: grpc.Channel, method: str, request: Any, key: str | None) -> str:
    """OK if the call has a first message, else the status."""
    metadata = [] if key is None else [("authorization", f"Bearer {key}")]
    begin: Any = channel.stream_stream(f"/{method}")
    call = begin(iter([request.SerializeToString()]), metadata=metadata, timeout=SOON)
    try:
        next(call)
    except grpc.RpcError:
        return call.code().name
    call.cancel()
    return "OK"


def test_without_keys_all_share_what_is_stored(tmp_path: Path) -> None:
    options = EndpointOptions(port=0, grpc_port=None, access_log="off", batch_dir=tmp_path)
    with serving(options=options) as server, connected(server) as client:
        things = things_of(server)
        for (method, path), row in ROUTES.items():
            if method == "GET" and row.statuses == OWNER:
                assert answer(client, "any-other-key", method, filled(path, things))[0] == 200
        listed = answer(client, None, "GET", "/v1/files")[1] + answer(client, None, "GET", "/v1/batches")[1]
        assert things["{file_id}"] in listed and things["{batch_id}"] in listed
        assert '"shows_ids":true' in answer(client, None, "GET", "/live/events")[1]
