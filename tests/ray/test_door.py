"""The owner of a request at the ingress: its cost counts for the API key or address, as on one server."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from server.gateway import lanes
from server.ray import door as door_module
from server.ray.asgi_call import HttpCall
from server.ray.door import Door
from server.ray.routing.prefix_choice import RoutingKey
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions

FIRST, SECOND = "first-tenant-key", "second-tenant-key"
KEYS = ApiKeys([FIRST, SECOND])
BODY = b'{"prompt": "a"}'


class Sent(Exception):
    """A request reached the engine's handle."""


class Handle:
    """A stand-in for the engine's handle, which keeps the requests sent to it."""

    def __init__(self) -> None:
        self.sent: list[HttpCall] = []
        self.call = SimpleNamespace(remote=self._remote)

    def options(self, **_: Any) -> "Handle":
        return self

    def _remote(self, call: HttpCall) -> None:
        self.sent.append(call)
        raise Sent


class Client:
    """An ingress, and its reaction to a request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, keys: ApiKeys) -> None:
        replica = SimpleNamespace(replica_id=SimpleNamespace(unique_id="door"))
        monkeypatch.setattr(door_module.serve, "get_replica_context", lambda: replica)
        monkeypatch.setattr(door_module, "routing_key", self._routing_key)
        handle: Any = Handle()
        self.handle = handle
        self.door = Door(handle, EndpointOptions(), model_name="base", api_keys=keys, admin_keys=ApiKeys())
        self.read: list[tuple[str, bytes]] = []  # owner and tenant of each body

    def _routing_key(self, path: str, tenant: bytes, body: bytes, base: str) -> RoutingKey:
        assert (body, base) == (BODY, "base")
        self.read.append((lanes._owner.get(), tenant))
        return RoutingKey()

    def send(self, address: str, path: str = "/v1/completions", **headers: str) -> HttpCall:
        """Send a request below the application's prefix; return what reached the engine's handle."""
        given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {
            "type": "http",
            "method": "POST",
            "path": f"/app{path}",
            "root_path": "/app",
            "query_string": b"",
            "headers": given,
            "client": (address, 5000),
        }

        async def receive() -> Message:
            return {"type": "http.request", "body": BODY, "more_body": False}

        with pytest.raises(Sent):
            asyncio.run(self.door(Request(scope, receive)))
        return self.handle.sent[-1]


def test_a_body_is_read_on_behalf_of_the_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(monkeypatch, KEYS)
    for key in (FIRST, SECOND):
        assert client.send("1.2.3.4", authorization=f"Bearer {key}").body == BODY
    assert client.send("1.2.3.4", "/v1/messages", x_api_key=SECOND).body == BODY
    assert client.read == [("key 1", b"key 1"), ("key 2", b"key 2"), ("key 2", b"key 2")]


def test_without_keys_a_body_is_read_on_behalf_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(monkeypatch, ApiKeys())
    for address in ("1.2.3.4", "2001:db8::1", "2001:db8::2"):
        client.send(address, authorization="Bearer whatever")
    assert client.read == [
        ("address 1.2.3.4", b""),
        *[("address 20010db800000000::/64", b"")] * 2,
    ]


def test_no_body_is_read_without_a_valid_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gets only the headers, and refuses the request as a single server would."""
    client = Client(monkeypatch, KEYS)
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x_api_key": FIRST}):
        assert client.send("1.2.3.4", **headers).body == b""
    assert client.read == []
