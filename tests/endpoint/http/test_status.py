"""Health probes, the models list and the OpenAPI document, in every phase of a server's life."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

import orca_jax
from orca_jax.errors import EngineError
from orca_jax.request.sampling_params import SamplingParams
from server.gateway.gateway import Phase
from server.settings.api_keys import ApiKeys
from tests.endpoint.harness import Server, serving, until
from tests.endpoint.http_client import connected
from tests.host.engines import SOON, PacedEngine

LONG = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}


def test_while_the_model_loads() -> None:
    with serving(ready=False) as server, connected(server) as client:
        assert client.get("/health").status_code == 200
        response = client.get("/ready")
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert response.json() == {"status": "loading", "reason": "the model is still loading"}
        for response in (client.get("/v1/models"), client.post("/tokenize", json={"prompt": "a"})):
            assert (response.status_code, response.headers["retry-after"]) == (503, "5")
            assert response.json()["error"]["code"] == "not_ready"
        server.call(lambda: server.gateway.open(server.model))
        assert client.get("/ready").json() == {"status": "ready"}


def test_while_the_server_drains() -> None:
    with serving(seconds=0.01) as server, connected(server) as client:
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
            chunks = stream.iter_bytes()
            assert next(chunks).startswith(b"data: ")
            draining = asyncio.run_coroutine_threadsafe(server.gateway.drain(0.2), server.loop)
            until(lambda: server.gateway.phase is Phase.DRAINING, "the phase")
            with connected(server) as other:
                assert other.get("/health").status_code == 200
                response = other.get("/ready")
                assert (response.status_code, response.headers["retry-after"]) == (503, "5")
                assert response.json() == {"status": "draining", "reason": "the server is shutting down"}
                assert other.post("/v1/completions", json=LONG).status_code == 503
            assert draining.result(SOON) == 1
            rest = b"".join(chunks)
        assert b"shutting down" in rest, "the stream says why it ended"
        assert b"[DONE]" not in rest


def test_when_the_engine_failed() -> None:
    engine = PacedEngine(seconds=0.001)
    with serving(engine=engine) as server, connected(server) as client:
        assert client.get("/ready").status_code == 200
        engine.error = RuntimeError("the device is lost")
        generation = server.service.submit([1], SamplingParams(max_tokens=5))
        with pytest.raises(EngineError):
            generation.result(SOON)
        assert client.get("/health").status_code == 200
        response = client.get("/ready")
        assert response.status_code == 503
        assert "retry-after" not in response.headers, "it will not come back"
        assert response.json()["status"] == "failed"
        assert "the device is lost" in response.json()["reason"]
        response = client.post("/v1/completions", json=LONG)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_failed")
        assert "the device is lost" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_may_use_head_requests(client: httpx2.Client, path: str) -> None:
    response = client.head(path)
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-length"] == client.get(path).headers["content-length"]


def test_version_has_the_packages_version(client: httpx2.Client) -> None:
    assert client.get("/version").json() == {"version": orca_jax.__version__}


def test_prometheus_can_parse_the_metrics(client: httpx2.Client) -> None:
    response = client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name for family in text_string_to_metric_families(response.text)}
    assert {"orca_http_requests", "orca_num_requests_running", "orca_num_requests_waiting"} <= families


def test_many_scrapes_at_once(server: Server) -> None:
    def scrape(_: int) -> set[str]:
        with connected(server) as client:
            text = client.get("/metrics").text
        return {family.name for family in text_string_to_metric_families(text)}

    with ThreadPoolExecutor(8) as pool:
        result = list(pool.map(scrape, range(32)))
    assert "orca_asyncio_tasks" in result[0] and result == [result[0]] * 32


def test_models_has_the_served_model(server: Server, client: httpx2.Client) -> None:
    model = {
        "id": "test",
        "object": "model",
        "created": server.model.created,
        "owned_by": "orca_jax",
        "max_model_len": 512,
        "inputs": ["text", "token_ids", "messages"],
    }
    assert client.get("/v1/models").json() == {"object": "list", "data": [model]}
    assert client.get("/v1/models/test").json() == model
    with serving(chat_template=None) as other, connected(other) as client:
        assert client.get("/v1/models/test").json()["inputs"] == ["text", "token_ids"]
    with serving(tokenizer=False) as other, connected(other) as client:
        assert client.get("/v1/models/test").json()["inputs"] == ["token_ids"]


@pytest.mark.parametrize("name", ["other", "org/name", "test/", "TEST", "%20", "t%65st%00"])
def test_an_unknown_model(client: httpx2.Client, name: str) -> None:
    response = client.get(f"/v1/models/{name}")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'test' is served" in error["message"]


def statuses(document: dict[str, Any], method: str, path: str) -> list[int]:
    return [int(status) for status in document["paths"][path][method]["responses"]]


def test_the_openapi_document_lists_the_actual_responses(client: httpx2.Client) -> None:
    document = client.get("/openapi.json").json()
    assert document["info"]["version"] == orca_jax.__version__
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert statuses(document, "post", path) == [200, 400, 404, 408, 413, 415, 429, 500, 503, 504]
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}
    for path in ("/tokenize", "/detokenize"):
        assert statuses(document, "post", path) == [200, 400, 404, 408, 413, 415, 503]
    assert statuses(document, "get", "/v1/models") == [200, 503]
    assert statuses(document, "get", "/v1/models/{model_id}") == [200, 404, 503]
    assert statuses(document, "get", "/ready") == [200, 503]
    for path in ("/health", "/version", "/metrics"):
        assert statuses(document, "get", path) == [200]
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert "security" not in str(document), "no key is needed here"


def test_every_error_in_the_openapi_document_has_the_usual_form(client: httpx2.Client) -> None:
    document = client.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for status, response in operation["responses"].items():
                if int(status) >= 400 and path != "/ready":
                    schema = response["content"]["application/json"]["schema"]
                    form = "MessagesErrorBody" if path.startswith("/v1/messages") else "ErrorBody"
                    assert schema == {"$ref": f"#/components/schemas/{form}"}, (path, status)


def test_the_openapi_document_says_where_a_key_is_needed() -> None:
    with serving(keys=ApiKeys(["key-number-1"])) as server, connected(server) as client:
        document = client.get("/openapi.json").json()
    own = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    schemes = {"bearer": {"type": "http", "scheme": "bearer"}, "x-api-key": own}
    assert document["components"]["securitySchemes"] == schemes
    secured = {
        path
        for path, methods in document["paths"].items()
        for operation in methods.values()
        if {"bearer": []} in operation.get("security", []) and "401" in operation["responses"]
        if ({"x-api-key": []} in operation["security"]) == path.startswith("/v1/messages")
    }
    assert secured == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/score",
        "/v1/rerank",
        "/v1/models",
        "/v1/models/{model_id}",
        "/tokenize",
        "/detokenize",
        "/live/events",
        "/live/files/{name}",
    }
