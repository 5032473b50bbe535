"""A child process that answers questions, so that its processor time can be measured separately."""

import asyncio
import multiprocessing
import os
from collections.abc import Callable, Collection, Coroutine
from multiprocessing.connection import Connection
from typing import Any, Self

import uvloop


class OtherProcess:
    """Runs `target(connection)` in a fresh interpreter; a context manager.

    `target`, a function of a module, takes questions from the connection and sends one answer to each, until
    EOFError. With `cores` it and its children run on these alone.
    """

    def __init__(self, target: Callable[[Connection], None], *, cores: Collection[int] | None = None) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of threads of JAX or gRPC would hang
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(target, theirs, cores), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, question: Any, *, seconds: float = 300.0) -> Any:
        """The answer. Raises TimeoutError after `seconds`, and EOFError if the process is gone."""
        self._connection.send(question)
        if not self._connection.poll(seconds):
            raise TimeoutError(f"no answer within {seconds:g} seconds")
        return self._connection.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)


def _run(target: Callable[[Connection], None], connection: Connection, cores: Collection[int] | None) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)
    target(connection)


def answer_each(connection: Connection, answer: Callable[[Any], Coroutine[Any, Any, object]]) -> None:
    """For an OtherProcess: send what `answer(question)` returns, run on an event loop, until EOFError."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while True:
            try:
                question = connection.recv()
            except EOFError:
                return
            connection.send(runner.run(answer(question)))
