"""A request's client, as far as the application may know it without waiting for its messages.

ASGI's only way to learn that a client has left is a task that waits for the next message. It takes a tenth of
a short completion's time, so a connection tells this object as well. Other servers do not make one.
"""

from collections.abc import Callable

from starlette.types import Scope


class Caller:
    """The client of one request; the connection calls `sent_all` and `leave`, the application the rest.

    `has_sent_all`: the request's body is complete, so that the next message is there. `has_left`: the client
    closed the connection before the response was complete.
    """

    def __init__(self) -> None:
        self.has_sent_all = self.has_left = False
        self._on_departure: Callable[[], object] | None = None

    def on_departure(self, call: Callable[[], object] | None) -> None:
        """Call this, and not what was given before, when the client leaves; at once if it has left."""
        self._on_departure = call
        if call is not None and self.has_left:
            call()

    def sent_all(self) -> None:
        self.has_sent_all = True

    def leave(self) -> None:
        self.has_left = True
        if self._on_departure is not None:
            self._on_departure()


def caller_of(scope: Scope) -> Caller | None:
    """The caller of a request, if its server made one."""
    return scope.get("state", {}).get("caller")
