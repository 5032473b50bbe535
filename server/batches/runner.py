"""Runs batches: a few lines at a time, and none while any request waits for the engine.

One task owns everything: it opens batches, starts lines, and ends both. Lines of several batches take turns.
A line that was refused because the engine is busy or stops runs again; whatever has no result when the server
ends runs after the next start.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from orca_jax.errors import OrcaError
from server.batches.batch import Batch, Status
from server.batches.lines import InputLine, error_line, result_line
from server.batches.running import RunningBatch
from server.errors import StoreFull

_LOGGER = logging.getLogger("orca")
_POLL_SECONDS = 0.05  # between two looks whether the engine has room
_AGAIN_SECONDS = 1.0  # before a refused line runs again
_AT_ONCE = 200  # lines read in one turn of the thread
_BUSY = frozenset((429, 503))

T = TypeVar("T")


class Answered(NamedTuple):
    """What a line's request was answered; `body` is JSON in one line."""

    status: int
    request_id: str
    body: bytes


Answer = Callable[[Batch, InputLine], Awaitable[Answered]]


class _Running:
    """A batch with its lines in flight."""

    def __init__(self, opened: RunningBatch) -> None:
        self.opened = opened
        self.batch = opened.batch
        self.lines: set[asyncio.Task[None]] = set()
        self.is_read = False  # no line is left to start, unless one is given back
        self.ending: Status | None = None  # why no more of its lines are to start

    def fail(self, error: Exception) -> None:
        """No more of its lines are to start, because a result could not be kept."""
        self.batch.errors = [{"code": "store_full", "line": None, "message": str(error), "param": None}]
        self.ending = "failed"


class BatchRunner:
    """`run` is the task; cancelling it ends every line, and leaves the batches for the next start.

    `answer` answers a line, `room` says how many lines may run now, and `stopping` whether the server ends.
    `open_batch` and `save`, of a batch's state, run on `thread`, where the disk is used.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        open_batch: Callable[[Batch], RunningBatch],
        save: Callable[[Batch], None],
        room: Callable[[], int],
        stopping: Callable[[], bool],
        thread: ThreadPoolExecutor,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._answer, self._open, self._save = answer, open_batch, save
        self._room, self._stopping = room, stopping
        self._thread, self._clock = thread, clock
        self._new: deque[Batch] = deque()
        self._running: dict[str, _Running] = {}
        self._opened: set[RunningBatch] = set()  # with open files; used on the thread alone
        self._changed = asyncio.Event()

    @property
    def n_lines(self) -> int:
        """Lines in flight."""
        return sum(len(running.lines) for running in self._running.values())

    def add(self, batches: Iterable[Batch]) -> None:
        """Run these batches too, the oldest first."""
        self._new.extend(batches)
        self._changed.set()

    def cancel(self, batch: Batch) -> None:
        """End the batch's lines now; what has a result is kept."""
        if not batch.ended and batch.status != "cancelling":
            batch.become("cancelling")
            self._changed.set()

    async def run(self) -> None:
        """Run until the server stops."""
        try:
            while not self._stopping():
                self._changed.clear()
                if not await self._turn():
                    try:
                        async with asyncio.timeout(_POLL_SECONDS):
                            await self._changed.wait()
                    except TimeoutError:
                        pass
        finally:
            for running in self._running.values():
                await self._end_lines(running)
            self._running.clear()
            # After whatever the thread still does for a step that was cancelled, such as opening a batch.
            await self._on_thread(self._close_all)

    async def _turn(self) -> bool:
        """One step of each batch; whether there may be more to do at once."""
        if self._new:
            await self._begin(self._new.popleft())
            return True
        busy = False
        for running in list(self._running.values()):
            busy = await self._step(running) or busy
        return busy

    async def _begin(self, batch: Batch) -> None:
        try:
            opened = await self._on_thread(lambda: self._open_files(batch))
        except (OrcaError, OSError) as error:
            batch.errors = [{"code": "input_gone", "line": None, "message": str(error), "param": None}]
            batch.become("failed")
            await self._on_thread(lambda: self._save(batch))
            return
        self._running[batch.id] = _Running(opened)

    async def _step(self, running: _Running) -> bool:
        batch, opened = running.batch, running.opened
        try:
            if batch.status == "cancelling":
                running.ending = "cancelled"
            elif running.ending is None and self._clock() >= batch.expires_at:
                running.ending = "expired"
            if running.ending is not None:
                await self._end_lines(running)
                if running.ending == "expired" and batch.status == "in_progress":
                    while await self._on_thread(lambda: opened.expire(_AT_ONCE)):
                        pass
                return await self._finish(running, running.ending)
            if batch.status == "validating":
                return await self._validate(running)
            if running.is_read and not running.lines:
                return await self._finish(running, "completed")
            return await self._start_line(running)
        except (StoreFull, OSError) as error:
            running.fail(error)
            await self._end_lines(running)
            return await self._finish_failed(running)

    async def _validate(self, running: _Running) -> bool:
        if await self._on_thread(lambda: running.opened.validate(_AT_ONCE)):
            return True
        if running.batch.ended:
            return await self._finish(running, "failed")
        return True

    async def _start_line(self, running: _Running) -> bool:
        if running.is_read or self._room() <= self.n_lines:
            return False
        line = await self._on_thread(running.opened.next_line)
        if line is None:
            running.is_read = True
            return True
        task = asyncio.create_task(self._line(running, line), name=f"line of {running.batch.id}")
        running.lines.add(task)
        task.add_done_callback(running.lines.discard)
        task.add_done_callback(lambda _: self._changed.set())
        return True

    async def _line(self, running: _Running, line: InputLine) -> None:
        try:
            status, request_id, body = await self._answer(running.batch, line)
        except Exception:
            _LOGGER.exception("a line of batch %s failed", running.batch.id)
            result = error_line(line.custom_id, "server_error", "the server failed in an unexpected way")
            success = False
        else:
            if status in _BUSY:
                await asyncio.sleep(_AGAIN_SECONDS)
                await self._on_thread(lambda: running.opened.give_back(line))
                running.is_read = False
                return
            success = status < 400
            result = result_line(line.custom_id, status, request_id, body)
        try:
            await self._on_thread(lambda: running.opened.record(result, success=success))
        except (StoreFull, OSError) as error:
            running.fail(error)

    async def _end_lines(self, running: _Running) -> None:
        lines = list(running.lines)
        for line in lines:
            line.cancel()
        await asyncio.gather(*lines, return_exceptions=True)

    async def _finish(self, running: _Running, status: Status) -> bool:
        batch = running.batch
        if status == "completed":
            batch.become("finalizing")
        await self._on_thread(lambda: self._finish_files(running.opened, status))
        del self._running[batch.id]
        return True

    async def _finish_failed(self, running: _Running) -> bool:
        try:
            return await self._finish(running, "failed")
        except OSError:
            name = running.batch.id
            _LOGGER.exception("batch %s cannot be written; it goes on after the next start", name)
            await self._on_thread(lambda: self._close_files(running.opened))
            del self._running[name]
            return True

    def _open_files(self, batch: Batch) -> RunningBatch:
        opened = self._open(batch)
        self._opened.add(opened)
        return opened

    def _finish_files(self, opened: RunningBatch, status: Status) -> None:
        opened.finish(status)
        self._opened.remove(opened)

    def _close_files(self, opened: RunningBatch) -> None:
        opened.close()
        self._opened.remove(opened)

    def _close_all(self) -> None:
        for opened in list(self._opened):
            self._close_files(opened)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
