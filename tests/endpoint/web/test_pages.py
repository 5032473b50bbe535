"""The pages' files: headers, types and keys, and no reference to another host."""

import re

import httpx2
import pytest

from server.http.pages import PAGES, page_files
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import serving
from tests.endpoint.http_client import connected

FILES = sorted(page_files())


@pytest.mark.parametrize("path", [*PAGES, *(f"/static/{name}" for name in FILES)])
def test_every_file_forbids_what_is_not_its_own(client: httpx2.Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    policy = dict(
        part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[kind] for kind in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert response.headers["x-content-type-options"] == "nosniff"
    assert policy["require-trusted-types-for"] == "'script'" and policy["trusted-types"] == "'none'"
    assert response.headers["x-dns-prefetch-control"] == "off"
    kinds = {"js": "javascript", "css": "css", "md": "plain", "txt": "plain"}
    suffix = path.rpartition(".")[2]
    kind = "image/svg+xml" if suffix == "svg" else f"text/{kinds.get(suffix, 'html')}; charset=utf-8"
    assert response.headers["content-type"] == kind
    assert client.head(path).headers["content-length"] == str(len(response.content))


def test_an_unchanged_file_is_not_sent_again(client: httpx2.Client) -> None:
    first = client.get("/live")
    again = client.get("/live", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/live", headers={"If-None-Match": '"other"'}).content == first.content


@pytest.mark.parametrize(
    "name", ["", "nothing.js", "../feed.py", "..%2ffeed.py", "live", "/etc/passwd", "%00"]
)
def test_there_are_no_other_files(client: httpx2.Client, name: str) -> None:
    response = client.get(f"/static/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "unknown_url"


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_host_or_runs_inline_code(name: str) -> None:
    text = page_files()[name].content.decode("utf-8")
    others = re.findall(r"""(?:src|href|import|url|fetch|from)\W{0,3}(?:https?:)?//[^\s"'`)]+""", text)
    assert others == []
    if name.endswith(".html"):
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style\b|\sstyle=|\son\w+=", text)


def test_pages_need_no_key_and_can_be_off() -> None:
    with serving(keys=ApiKeys(["a-secret-key"])) as server, connected(server) as client:
        assert {client.get(path).status_code for path in PAGES} == {200}
        assert client.get("/v1/models").status_code == 401
    with (
        serving(options=EndpointOptions(port=0, grpc_port=0, pages=False)) as server,
        connected(server) as client,
    ):
        for path in (*PAGES, f"/static/{FILES[0]}", "/live/events"):
            assert client.get(path).json()["error"]["code"] == "unknown_url"
        assert client.get("/openapi.json").status_code == 200
