"""Limits and measures how long anything holds the event loop or the GIL, because then nobody is answered.

`settle` sets the interpreter so that holds are short; the Watchdog measures those that remain. Its thread
asks the event loop for a sign of life again and again. If none comes in time, it logs what the loop's thread
is doing. If the watching thread itself is late, something holds the GIL: a call into C, mostly.
"""

import asyncio
import gc
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_LOGGER = logging.getLogger("orca")
_PERIOD = 0.02  # seconds between two questions
LONG = 0.05  # seconds of a hold that is counted and logged
_LOG_SECONDS = 10.0  # between two log lines, so that a slow machine does not fill its log
_MOST_STACK = 12  # innermost calls in a log line
_SWITCH_SECONDS = 0.001  # Python's default is 0.005
_COLLECTIONS = (700, 10, 50)  # a collection of a generation after so many allocations, or younger ones
_MOST_RECENT = 64  # long holds that `since` still knows


def settle() -> None:
    """Set the interpreter so that no request can make it block all threads; call this once all is loaded.

    Large bodies trigger full garbage collections, which visit every object and take 0.2 s with JAX loaded.
    Freezing the objects that exist now exempts them. Those of a large body take 33 ms more (a conversation of
    5,000 tool turns), so full collections come a fifth as often as by Python's default. Our requests and
    connections leave no reference cycles, but libraries do (gRPC: one a call), and those that a younger
    collection finds in use wait for a full one, which therefore must not be rare either. A thread that waits
    for the GIL now gets it after 1 ms: the event loop waits for it several times per request while another
    thread computes.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTIONS)
    sys.setswitchinterval(_SWITCH_SECONDS)


@dataclass(frozen=True, slots=True)
class Hold:
    """A hold of LONG seconds or more of the `"event loop"` or the `"gil"`, that ended at `clock`'s time."""

    what: str
    seconds: float
    ended: float


class Watchdog:
    """Holds of one event loop since the start. Make it on the loop's thread; counts are for any thread.

    `longest_loop` and `longest_gil` are seconds since the last `take_longest`, `n_loop` and `n_gil` count
    holds of LONG seconds and more. `clock` and `sleep` are for tests.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.clock = clock
        self._loop, self._sleep = loop, sleep
        self._recent = deque[Hold](maxlen=_MOST_RECENT)
        self._n_recorded = 0
        self._lock = threading.Lock()  # for these two
        self._loop_thread = threading.get_ident()
        self._answered = threading.Event()
        self._is_over = False
        self._logged_at = -_LOG_SECONDS
        self.longest_loop = self.longest_gil = 0.0
        self.n_loop = self.n_gil = 0
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over = True

    def take_longest(self) -> tuple[float, float]:
        """The longest hold of the loop and of the GIL since the last call, in seconds."""
        longest = self.longest_loop, self.longest_gil
        self.longest_loop = self.longest_gil = 0.0
        return longest

    def since(self, n: int) -> tuple[list[Hold], int]:
        """The recent long holds after the first `n`, and the number of all so far."""
        with self._lock:
            new = min(self._n_recorded - n, len(self._recent))
            return [*self._recent][len(self._recent) - new :], self._n_recorded

    def _run(self) -> None:
        while not self._is_over:
            self.look()

    def look(self) -> None:
        """Ask the loop once, and record how late its answer and this thread are."""
        asked = self.clock()
        self._sleep(_PERIOD)
        late = self.clock() - asked - _PERIOD
        self.longest_gil = max(self.longest_gil, late)
        if late >= LONG:
            self.n_gil += 1
            self._log("the GIL", late)
            self._record("gil", late)
        self._answered.clear()
        asked = self.clock()
        try:
            self._loop.call_soon_threadsafe(self._answered.set)
        except RuntimeError:  # the loop is closed
            self._is_over = True
            return
        is_long = not self._answered.wait(LONG)
        if is_long:
            self.n_loop += 1
            self._log("the event loop", self.clock() - asked)
            while not self._answered.wait(LONG) and not self._is_over:
                pass
        waited = self.clock() - asked
        self.longest_loop = max(self.longest_loop, waited)
        if is_long:
            self._record("event loop", waited)

    def _record(self, what: str, seconds: float) -> None:
        with self._lock:
            self._recent.append(Hold(what, seconds, self.clock()))
            self._n_recorded += 1

    def _log(self, what: str, seconds: float) -> None:
        now = self.clock()
        if now - self._logged_at < _LOG_SECONDS:
            return
        self._logged_at = now
        frame = sys._current_frames().get(self._loop_thread)
        stack = [] if frame is None else traceback.extract_stack(frame)[-_MOST_STACK:]
        calls = " < ".join(f"{call.name} ({call.filename}:{call.lineno})" for call in reversed(stack))
        _LOGGER.warning("%s was held for %.0f ms or more; its thread is in %s", what, 1000 * seconds, calls)
