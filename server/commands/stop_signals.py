"""SIGTERM, SIGHUP and Ctrl-C: the first signal starts a drain, the second ends it at once."""

import asyncio
import signal
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """A signal arrived before the work was done; `signal` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.signal = number


class StopSignals:
    """Handles signals from construction on; `first` and `second` are set when they arrive."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._number = 0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # `nohup` starts programs with SIGHUP ignored, which must stay in effect.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        (self.second if self.first.is_set() else self.first).set()
        self._number = number

    async def unless(self, work: "asyncio.Future[T]") -> T:
        """The result of `work`; raises Stopped if a signal arrives first."""
        stop = asyncio.create_task(self.first.wait())
        await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not work.done():
            work.cancel()
            raise Stopped(self._number)
        return work.result()


def in_daemon_thread(function: Callable[[], T]) -> "asyncio.Future[T]":
    """Run `function` on a thread that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def resolve(outcome: Callable[[], None]) -> None:
        if not done.done():
            outcome()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            loop.call_soon_threadsafe(resolve, lambda error=error: done.set_exception(error))
        else:
            loop.call_soon_threadsafe(resolve, lambda: done.set_result(result))

    threading.Thread(target=run, name=f"daemon-{function.__name__}", daemon=True).start()
    return done
