"""`--allow-origins`: web pages of these origins may call the API from a browser."""

from collections.abc import Iterator
from typing import Any

import pytest

from orca_jax.errors import ConfigError
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import Server, serving
from tests.endpoint.http_client import connected

PAGE, OTHER = "https://chat.example.org", "https://other.example.org"
KEY = "key-number-1"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ALLOWED, EXPOSED = "access-control-allow-origin", "access-control-expose-headers"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "store": True},
    RESPONSES: {"input": "a", "max_output_tokens": 1, "service_tier": "flex"},
    MESSAGES: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "speed": "fast"},
}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    with serving(options=options(PAGE)) as server:
        yield server


def options(allow_origins: str | None) -> EndpointOptions:
    return EndpointOptions(port=0, grpc_port=0, access_log="off", allow_origins=allow_origins)


def preflight(origin: str) -> dict[str, str]:
    asked = "authorization, content-type, x-api-key, anthropic-version, x-stainless-os"
    return {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": asked,
    }


@pytest.mark.parametrize("allow", [f"http://localhost:3000, {PAGE}", "*"])
def test_a_page_of_an_allowed_origin_calls_every_protocol(allow: str) -> None:
    shown = "*" if allow == "*" else PAGE
    with serving(options=options(allow), keys=ApiKeys([KEY])) as server, connected(server) as client:
        for path, body in BODIES.items():
            asked = client.options(path, headers=preflight(PAGE))
            assert (asked.status_code, asked.headers[ALLOWED]) == (200, shown), "a preflight has no key"
            assert "POST" in asked.headers["access-control-allow-methods"]
            taken = asked.headers["access-control-allow-headers"].lower().replace(" ", "").split(",")
            assert {"authorization", "content-type", "x-api-key", "anthropic-version"} <= {*taken}
            for stream in (False, True):
                headers = {"Origin": PAGE, "Authorization": f"Bearer {KEY}"}
                answer = client.post(path, json={**body, "stream": stream}, headers=headers)
                assert (answer.status_code, answer.headers[ALLOWED]) == (200, shown)
                assert answer.headers["x-orca-ignored"] in ("store", "service_tier", "speed")
                exposed = answer.headers[EXPOSED].split(", ")
                assert {"x-orca-ignored", "x-request-id", "request-id", "retry-after"} == {*exposed}
            for headers, status in (({"Authorization": f"Bearer {KEY}"}, 400), ({}, 401)):
                answer = client.post(path, json={}, headers={"Origin": PAGE, **headers})
                assert (answer.status_code, answer.headers[ALLOWED]) == (status, shown), "a page reads errors"
        listed = client.get("/v1/models", headers={"Origin": PAGE, "Authorization": f"Bearer {KEY}"})
        assert (listed.status_code, listed.headers[ALLOWED]) == (200, shown)


def test_a_page_of_another_origin_gets_no_permission() -> None:
    with serving(options=options(PAGE)) as server, connected(server) as client:
        for other in (OTHER, f"{PAGE}.evil.org", "http://chat.example.org", "null"):
            asked = client.options(CHAT, headers=preflight(other))
            assert asked.status_code == 400 and ALLOWED not in asked.headers
            answer = client.post(CHAT, json=BODIES[CHAT], headers={"Origin": other})
            assert ALLOWED not in answer.headers


FORM = {"Content-Type": "multipart/form-data; boundary=x"}


@pytest.mark.parametrize(
    "headers",
    [
        {**FORM, "Origin": OTHER},
        {**FORM, "Origin": "null"},
        {**FORM, "Origin": f"{PAGE}.evil.org"},
        {**FORM, "Sec-Fetch-Site": "cross-site"},
        {"Content-Type": "TEXT/plain; charset=utf-8", "Origin": OTHER},
        {"Origin": OTHER},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches/batch_1/cancel"])
def test_posts_without_preflight_from_another_sites_page_are_refused(
    guarded: Server, path: str, headers: dict[str, str]
) -> None:
    with connected(guarded) as client:
        refused = client.post(path, content=b"", headers=headers)
    assert refused.status_code == 403 and "--allow-origins" in refused.json()["error"]["message"]


def test_posts_without_preflight_from_allowed_pages_and_programs_are_accepted(guarded: Server) -> None:
    with connected(guarded) as client:
        own = guarded.url.replace("http://", "https://")  # TLS may end at a proxy
        for headers in ({"Origin": PAGE}, {"Origin": guarded.url}, {"Origin": own}, {}):
            answer = client.post("/v1/files", content=b"", headers={**FORM, **headers})
            assert answer.status_code != 403
        assert client.post(CHAT, json=BODIES[CHAT], headers={"Origin": OTHER}).status_code == 200
    with serving(options=options("*")) as open_to_all, connected(open_to_all) as client:
        answer = client.post("/v1/files", content=b"", headers={**FORM, "Origin": OTHER})
        assert answer.status_code != 403


def test_it_is_off_by_default() -> None:
    with serving() as server, connected(server) as client:
        asked = client.options(CHAT, headers=preflight(PAGE))
        assert asked.status_code == 405 and ALLOWED not in asked.headers
        answer = client.post(CHAT, json=BODIES[CHAT], headers={"Origin": PAGE})
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "given",
    [PAGE[8:], f"{PAGE}/", f"{PAGE}/a", f"{PAGE};{OTHER}", f"{PAGE} {OTHER}", f"{PAGE},", "https://*.org"],
)
def test_an_invalid_origin_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="allow_origins has"):
        options(given)
