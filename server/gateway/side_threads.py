"""Runs expensive work on threads, not on the event loop: of large requests and responses, and grammars.

Python runs one thread at a time, so a thread alone does not keep the event loop responsive: no single call of
a C function may hold the GIL for long either (`http/bodies/json_text.py` ensures that for request bodies).
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from orca_jax.errors import QueueFull
from orca_jax.request.output_form import PLAIN_TEXT, OutputForm
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.admission import weight_in_bytes
from orca_jax.service.prepared_params import OutputRules
from server.gateway.served_model import ServedModel

T = TypeVar("T")

LONG = 8_000  # bytes, characters or tokens: more takes over 1 to 2 ms, too long for the event loop
_VERY_LONG = 128_000  # above this, work has a thread of its own, so that shorter work does not wait for it
_MOST_BYTES = 64 << 20
_MOST_GRAMMARS = 16  # requests whose grammars wait to be compiled or are being compiled
_GRAMMAR_THREADS = 4  # only for grammars: compiling one may take seconds, and nothing else should wait for it
_HELD_PER_BYTE = 8  # roughly: bytes of memory that parameters take per byte of the request


class Lane:
    """A few threads with a bounded queue. Usable from any thread and any event loop."""

    def __init__(self, name: str, *, threads: int, most_waiting: int, most_bytes: int) -> None:
        """At most `most_waiting` requests, of `most_bytes` together, may wait or run.

        A single request is accepted whatever its size.
        """
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most_waiting, self._most_bytes = most_waiting, most_bytes
        self._lock = threading.Lock()
        self._n_waiting = self._n_bytes = 0
        self.n_done = 0

    async def run(self, n_bytes: int, work: Callable[[], T]) -> T:
        """The result of `work`, whose cost grows with `n_bytes`. Raises QueueFull and what `work` raises."""
        with self._lock:
            if self._n_waiting and (
                self._n_waiting >= self._most_waiting or self._n_bytes + n_bytes > self._most_bytes
            ):
                message = f"{self._n_waiting} long requests wait to be read, the limit; try again later"
                raise QueueFull(message)
            self._n_waiting += 1
            self._n_bytes += n_bytes

        def release(_: Future[T]) -> None:
            with self._lock:
                self._n_waiting -= 1
                self._n_bytes -= n_bytes
                self.n_done += 1

        try:
            future = self._threads.submit(work)
        except BaseException:  # no thread could be started
            release(Future())
            raise
        future.add_done_callback(release)
        return await asyncio.wrap_future(future)


# One set per process, which has one server: because of the GIL, more threads would not run at the same time.
_LONG = Lane("long", threads=1, most_waiting=256, most_bytes=_MOST_BYTES)
_LONGEST = Lane("longest", threads=1, most_waiting=32, most_bytes=_MOST_BYTES)
_RESPONSES = ThreadPoolExecutor(2, thread_name_prefix="responses")


def n_very_long() -> int:
    """How many very long requests have been processed so far."""
    return _LONGEST.n_done


async def run_for_request(n_bytes: int, work: Callable[[], T]) -> T:
    """Process what a request sent, before it is accepted: inline if short, on a thread if long.

    Raises QueueFull if too much such work is waiting.
    """
    if n_bytes <= LONG:
        return work()
    return await (_LONG if n_bytes <= _VERY_LONG else _LONGEST).run(n_bytes, work)


async def run_for_response(n_characters: int, work: Callable[[], T]) -> T:
    """Process part of a response: inline if short, on a thread if long.

    Never refused: the number of live requests bounds this work.
    """
    if n_characters <= LONG:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_RESPONSES, work)


class RuleCompiler:
    """Turns sampling parameters into output rules. Use it only on the server's event loop."""

    def __init__(self) -> None:
        self._n_waiting = 0
        self._threads = ThreadPoolExecutor(_GRAMMAR_THREADS, thread_name_prefix="rules")

    async def rules(
        self, model: ServedModel, sampling: SamplingParams, form: OutputForm = PLAIN_TEXT
    ) -> OutputRules:
        """The rules for requests with these parameters. Raises a leaf of InvalidRequest, or QueueFull."""
        make = partial(model.service.rules, sampling, form)
        if sampling.grammar is None and form.lark is None:
            n_bytes = weight_in_bytes((), sampling) // _HELD_PER_BYTE
            return await run_for_request(n_bytes, make)
        if self._n_waiting >= _MOST_GRAMMARS:
            raise QueueFull(f"{_MOST_GRAMMARS} grammars wait to be compiled, the limit; try again later")
        self._n_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, make)
        finally:
            self._n_waiting -= 1
