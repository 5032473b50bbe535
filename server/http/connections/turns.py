"""What clients bring about on the event loop, a little at a time: addresses take turns.

A thousand connections that open at once, or a thousand requests that come at once, would hold the loop for a
second if each were begun as soon as it is seen. So a few are begun in a turn of the loop, and another address
waits for a few, not for a thousand.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

_AT_ONCE = 8  # begun in one turn of the loop; a request's first step takes up to a millisecond


class Turns:
    """On one event loop; `at_once` pieces of work are begun in each of its turns."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, at_once: int = _AT_ONCE) -> None:
        self._loop = loop
        self._most = self._room = at_once
        self._waiting: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()  # by whose turn is next
        self._is_scheduled = False

    def begin(self, network: str, work: Callable[[], None]) -> None:
        """Call `work` now if this turn has room and nobody waits, else when it is this network's turn.

        Work of one network is done in its order. It must not raise.
        """
        if self._room and not self._waiting:
            self._room -= 1
            self._schedule()
            work()
            return
        self._waiting.setdefault(network, deque()).append(work)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        self._room = self._most
        while self._room and self._waiting:
            network, own = self._waiting.popitem(last=False)
            work = own.popleft()
            if own:
                self._waiting[network] = own  # behind the others
            self._room -= 1
            work()
        if self._waiting:
            self._schedule()
