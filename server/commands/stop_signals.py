"""SIGTERM, SIGHUP, Ctrl-C and the parent's end: the first starts a drain, a second signal ends it at once."""

import asyncio
import os
import signal
import stat
import threading
from collections.abc import Callable
from typing import TypeVar

from orca_jax.errors import ConfigError

T = TypeVar("T")

_STDIN = 0


class Stopped(Exception):
    """A signal arrived before the work was done; `signal` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.signal = number


class StopSignals:
    """Handles signals from construction on; `first` and `second` are set when they arrive.

    With `end_with_stdin` the end of standard input counts as a SIGHUP: the process that holds the other end
    of the pipe has ended, or has closed it. Raises ConfigError if standard input is no pipe.
    """

    def __init__(self, *, end_with_stdin: bool = False) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._number = 0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # `nohup` starts programs with SIGHUP ignored, which must stay in effect.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        if end_with_stdin:
            if not _is_pipe(_STDIN):
                raise ConfigError(
                    "end_with_stdin needs a pipe as standard input, which closes when the process that "
                    "started the server ends; start it with one, or leave end_with_stdin out"
                )
            loop.add_reader(_STDIN, self._read_stdin)

    def _read_stdin(self) -> None:
        if not os.read(_STDIN, 4096):
            asyncio.get_running_loop().remove_reader(_STDIN)
            self._on_signal(signal.SIGHUP)

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


def _is_pipe(file: int) -> bool:
    try:
        mode = os.fstat(file).st_mode
    except OSError:  # closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


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
