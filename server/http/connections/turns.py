"""Starts clients' work on the event loop a few pieces at a time, round-robin over client networks.

A thousand connections or requests that arrive together would block the event loop for a second if each
started immediately. Each turn of the loop therefore starts only a few, and another client waits for a few,
not for a thousand.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

_AT_ONCE = 8  # pieces started per turn of the loop; starting a request takes up to 1 ms


class Turns:
    """Starts at most `at_once` pieces of work in each turn of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, at_once: int = _AT_ONCE) -> None:
        self._loop = loop
        self._most = self._room = at_once
        self._waiting: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()  # the next network first
        self._is_scheduled = False

    def begin(self, network: str, work: Callable[[], None]) -> None:
        """Call `work` now if this turn has room and nothing waits, else when it is this network's turn.

        Work of one network runs in order. `work` must not raise.
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
                self._waiting[network] = own  # after the others
            self._room -= 1
            work()
        if self._waiting:
            self._schedule()
