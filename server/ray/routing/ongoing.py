"""How many requests a router has at each engine."""

from collections import Counter
from time import monotonic

_UNSENT_SECONDS = 5.0  # a request that was given up before it was sent is never reported as ended


class Ongoing:
    """Counts requests from the choice of their engine on, so that a burst is spread before any of it arrives.

    For one thread. A request is known by its id.
    """

    def __init__(self) -> None:
        self._chosen: dict[str, tuple[str, float]] = {}  # not known to have arrived; the oldest first
        self._running: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def count(self, engine: str) -> int:
        """The requests that are at `engine`, or on their way."""
        return self._counts[engine]

    def chose(self, request: str, engine: str, now: float | None = None) -> None:
        """The request is about to be sent to `engine`; until it arrives, another may be chosen."""
        now = monotonic() if now is None else now
        self.ended(request)
        self._forget_unsent(now)
        self._chosen[request] = engine, now
        self._counts[engine] += 1

    def arrived(self, request: str, engine: str) -> None:
        """The engine has accepted the request. One that has ended meanwhile is not counted again."""
        if (chosen := self._chosen.pop(request, None)) is None:
            return
        self._subtract(chosen[0])
        self._running[request] = engine
        self._counts[engine] += 1

    def ended(self, request: str) -> None:
        """The request has ended, or was refused."""
        if (chosen := self._chosen.pop(request, None)) is not None:
            self._subtract(chosen[0])
        if (engine := self._running.pop(request, None)) is not None:
            self._subtract(engine)

    def _forget_unsent(self, now: float) -> None:
        while self._chosen:
            request, (engine, since) = next(iter(self._chosen.items()))
            if now - since < _UNSENT_SECONDS:
                break
            del self._chosen[request]
            self._subtract(engine)

    def _subtract(self, engine: str) -> None:
        self._counts[engine] -= 1
        if not self._counts[engine]:
            del self._counts[engine]
