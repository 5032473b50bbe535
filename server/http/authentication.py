"""Identifies a request's client before its body is read: API keys, and requests from other sites' pages."""

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import NotPermitted, Unauthorized
from server.gateway.lanes import act_for
from server.http.bodies.errors import error_response, is_anthropic
from server.http.pages import PAGES, STATIC
from server.process.addresses import owner_at
from server.settings.api_keys import ApiKeys

# Every other path needs a key, so that a new route is never open by mistake.
DOCUMENT = "/openapi.json"
OPEN_PATHS = frozenset(("/health", "/ready", "/version", "/metrics", DOCUMENT, *PAGES))
_ADMIN = "/admin/"
_ADMIN_PATHS = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))


def is_admin(path: str) -> bool:
    """Whether a path needs an admin key, which opens no other path."""
    return path.startswith(_ADMIN) or path in _ADMIN_PATHS


class Authentication:
    """ASGI middleware that answers 401 if a path needs an API key and the request has no valid one."""

    def __init__(self, app: ASGIApp, *, api_keys: ApiKeys, admin_keys: ApiKeys) -> None:
        self._app = app
        self._api_keys = api_keys
        self._admin_keys = admin_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                identify(scope, scope["path"], api_keys=self._api_keys, admin_keys=self._admin_keys)
            except Unauthorized as error:
                await error_response(error, path=scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def identify(scope: Scope, path: str, *, api_keys: ApiKeys, admin_keys: ApiKeys) -> str:
    """The tenant of a request: its API key, or "" where no key is needed. Raises Unauthorized.

    The owner is the key, or else the client's address; the current task's work is charged to it from now on.
    Both are stored in the scope's state (http/state.py). Every entry over HTTP calls this first.
    """
    client = scope.get("client")
    address = owner_at(client[0] if client else "")
    act_for(address)
    if _is_open(path):
        key = None
    else:
        keys = admin_keys if admin_keys.required and is_admin(path) else api_keys
        key = _checked(keys, scope, path)
    tenant, owner = key or "", key or address
    scope.setdefault("state", {}).update(tenant=tenant, owner=owner)
    act_for(owner)
    return tenant


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(STATIC)


def _checked(keys: ApiKeys, scope: Scope, path: str) -> str | None:
    """The name of the request's API key, which Anthropic's clients may send in the header x-api-key."""
    if is_anthropic(path):
        key = _header(scope, b"x-api-key")
        if key is not None:
            return keys.check_key(key, "x-api-key: KEY")
    return keys.check(_header(scope, b"authorization"))


def _header(scope: Scope, wanted: bytes) -> str | None:
    for name, value in scope["headers"]:
        if name == wanted:
            return value.decode("latin-1")
    return None


# Content types ("" for none) with which a page may make a browser post to any server. For other types, like
# JSON, and other methods the browser asks the server first (CORS preflight).
_NO_PREFLIGHT = frozenset((b"", b"application/x-www-form-urlencoded", b"multipart/form-data", b"text/plain"))
_MOST_SHOWN = 100  # characters of the client's origin


class OriginCheck:
    """ASGI middleware that answers 403 to such requests from pages of origins that are not `allowed`."""

    def __init__(self, app: ASGIApp, *, allowed: list[str]) -> None:
        self._app = app
        self._allows_all = "*" in allowed
        self._allowed = frozenset(origin.encode("latin-1", "replace").lower() for origin in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and not self._allows_all:
            origin = self._foreign_origin(dict(scope["headers"]))
            if origin is not None:
                message = (
                    f"a page of {origin.decode('latin-1')[:_MOST_SHOWN]} may not send this; "
                    "orca serve --allow-origins names the origins that may"
                )
                response = error_response(NotPermitted(message), path=scope["path"])
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _foreign_origin(self, headers: dict[bytes, bytes]) -> bytes | None:
        """The origin that may not send the request; None if the request is allowed."""
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind not in _NO_PREFLIGHT:
            return None
        origin = headers.get(b"origin")
        if origin is None:
            return b"another site" if headers.get(b"sec-fetch-site") == b"cross-site" else None
        host = headers.get(b"host", b"").lower()
        if origin.lower() in self._allowed or origin.lower().partition(b"://")[2] == host != b"":
            return None
        return origin
