"""Checks API keys over HTTP, before any of the body is read."""

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import Unauthorized
from server.gateway.lanes import act_for
from server.http.bodies.errors import error_response, is_anthropic
from server.http.pages import PAGES, STATIC
from server.process.addresses import owner_at
from server.settings.api_keys import ApiKeys

# Every other path needs a key, so that a new route is never open by mistake.
OPEN_PATHS = frozenset(("/health", "/ready", "/version", "/metrics", "/openapi.json", *PAGES))
ADMIN = "/admin/"  # the paths below it need an admin key, which opens no other path


class Authentication:
    """ASGI middleware that answers 401 if a path needs an API key and the request has no valid one.

    It stores the owner and the tenant of each request in the scope's state, for generation/state.py.
    """

    def __init__(self, app: ASGIApp, *, api_keys: ApiKeys, admin_keys: ApiKeys) -> None:
        self._app = app
        self._api_keys = api_keys
        self._admin_keys = admin_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope["path"]):
            is_admin = self._admin_keys.required and scope["path"].startswith(ADMIN)
            keys = self._admin_keys if is_admin else self._api_keys
            try:
                key = _checked(keys, scope)
            except Unauthorized as error:
                await error_response(error, path=scope["path"])(scope, receive, send)
                return
            client = scope.get("client")
            scope["state"]["tenant"] = key or ""
            owner = key or owner_at(client[0] if client else "")
            scope["state"]["owner"] = owner
            act_for(owner)
        await self._app(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(STATIC)


def _checked(keys: ApiKeys, scope: Scope) -> str | None:
    """The name of the request's key. Anthropic's protocol may have it in a header of its own."""
    if is_anthropic(scope["path"]):
        own = _header(scope, b"x-api-key")
        if own is not None:
            return keys.check_key(own, "x-api-key: KEY")
    return keys.check(_header(scope, b"authorization"))


def _header(scope: Scope, wanted: bytes) -> str | None:
    for name, value in scope["headers"]:
        if name == wanted:
            return value.decode("latin-1")
    return None
