"""`model` names a LoRA adapter in every protocol, and /v1/models lists adapters with their parent."""

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from orca_jax.request.request import Request
from server.rpc import generation_pb2 as pb
from server.settings.api_keys import ApiKeys
from tests.endpoint.harness import Server, serving
from tests.endpoint.http_client import connected
from tests.endpoint.rpc_client import client as rpc_client
from tests.host.engines import FakeAdapters, FakeMemory

ADMIN = "the-operators-key"
HI = {"messages": [{"role": "user", "content": "Hi"}]}


def letter(request: Request, index: int) -> int:
    """The token that shows which adapter the engine was asked for."""
    return ord("-" if request.adapter is None else str(request.adapter.version))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(letter, memory=FakeMemory(), admin_keys=ApiKeys([ADMIN])) as server:
        server.service.adapter_store = FakeAdapters("sql", "support")
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx2.Client]:
    with connected(server) as client:
        yield client


@pytest.mark.parametrize(("name", "text"), [("test", "---"), ("sql", "000"), ("support", "111")])
@pytest.mark.parametrize(
    ("route", "fields", "place"),
    [
        ("/v1/completions", {"prompt": "ab", "max_tokens": 3}, ("choices", 0, "text")),
        ("/v1/chat/completions", {**HI, "max_tokens": 3}, ("choices", 0, "message", "content")),
        ("/v1/messages", {**HI, "max_tokens": 3}, ("content", 0, "text")),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 3}, ("output", 0, "content", 0, "text")),
    ],
)
def test_a_request_runs_with_the_adapter_that_model_names(
    client: httpx2.Client, route: str, fields: dict[str, Any], place: tuple[Any, ...], name: str, text: str
) -> None:
    response = client.post(route, json={"model": name, **fields}).json()
    assert response["model"] == name
    found: Any = response
    for key in place:
        found = found[key]
    assert found == text


def test_over_grpc(server: Server) -> None:
    with rpc_client(server) as stub:
        request = pb.GenerateRequest(model="support", text="ab", sampling=pb.SamplingParams(max_tokens=3))
        assert "".join(reply.text for reply in stub.Generate(request)) == "111"
        assert [model.name for model in stub.Models(pb.ModelsRequest()).models] == ["test", "sql", "support"]


def test_models_are_listed_with_their_parent(client: httpx2.Client) -> None:
    models = client.get("/v1/models").json()["data"]
    assert [(model["id"], model.get("parent")) for model in models] == [
        ("test", None),
        ("sql", "test"),
        ("support", "test"),
    ]
    assert client.get("/v1/models/sql").json() == models[1]


def test_another_name_is_refused_with_those_there_are(client: httpx2.Client) -> None:
    response = client.post("/v1/completions", json={"model": "sq", "prompt": "ab"})
    assert response.status_code == 404
    assert "no model 'sq' here; 'test', 'sql', 'support' are served" in response.json()["error"]["message"]


def change(client: httpx2.Client, route: str, **body: Any) -> httpx2.Response:
    """Post to one of vLLM's routes for adapters with the operator's key."""
    return client.post(f"/v1/{route}", json=body, headers={"Authorization": f"Bearer {ADMIN}"})


def text_of(client: httpx2.Client, model: str) -> str:
    body = {"model": model, "prompt": "ab", "max_tokens": 1}
    return client.post("/v1/completions", json=body).json()["choices"][0]["text"]


def test_adapters_come_and_go_while_the_server_runs(client: httpx2.Client) -> None:
    loaded = change(client, "load_lora_adapter", lora_name="new", lora_path="/new")
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert text_of(client, "new") == "2"
    assert [model["id"] for model in client.get("/v1/models").json()["data"]][-1] == "new"
    again = change(client, "load_lora_adapter", lora_name="new", lora_path="/new")
    assert again.status_code == 400 and "an adapter 'new' already" in again.json()["error"]["message"]
    assert change(client, "load_lora_adapter", lora_name="new", lora_path="/n", load_inplace=True).is_success
    assert text_of(client, "new") == "3"
    assert change(client, "unload_lora_adapter", lora_name="new").is_success
    gone = client.post("/v1/completions", json={"model": "new", "prompt": "ab"})
    assert gone.status_code == 404
    assert change(client, "unload_lora_adapter", lora_name="new").status_code == 404


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"lora_name": "bad", "lora_path": "wrong"}, "it holds NaN or infinite numbers"),
        ({"lora_name": "test", "lora_path": "/a"}, "'test', the model's name"),
        ({"lora_name": "a\nb", "lora_path": "/a"}, "printable characters"),
        ({"lora_name": "bad", "lora_path": "a\0b"}, "a zero byte"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_is_refused(
    client: httpx2.Client, fields: dict[str, str], complaint: str
) -> None:
    refused = change(client, "load_lora_adapter", **fields)
    assert refused.status_code == 400 and complaint in refused.json()["error"]["message"]
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["test", "sql", "support"]
