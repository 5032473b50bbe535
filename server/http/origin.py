"""Refuses what a web page of another site sends through its visitor's browser without asking leave."""

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import NotPermitted
from server.http.bodies.errors import error_response

# Of these, and without a type, a browser sends a POST to any server. It asks before it sends any other type,
# such as JSON, or another method (CORS preflight).
_UNASKED = frozenset((b"", b"application/x-www-form-urlencoded", b"multipart/form-data", b"text/plain"))
_MOST_SHOWN = 100  # characters of the client's origin


class OriginCheck:
    """ASGI middleware that answers 403 to such requests from origins other than this server and `allowed`."""

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
        """The origin that may not send this; None if the request may come."""
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind not in _UNASKED:
            return None
        origin = headers.get(b"origin")
        if origin is None:
            return b"another site" if headers.get(b"sec-fetch-site") == b"cross-site" else None
        host = headers.get(b"host", b"").lower()
        if origin.lower() in self._allowed or origin.lower().partition(b"://")[2] == host != b"":
            return None
        return origin
