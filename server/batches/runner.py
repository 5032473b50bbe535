"""Runs batches: a few lines at a time, and none while any request waits for the engine.

Each batch has a task of its own, so that a failing batch does not stop the others; their lines take turns. A
line that is refused because the engine is busy or stopping runs again, and a line without a result when the
server ends runs after the next start. While the disk fails, a batch waits and tries again.
"""

import asyncio
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import NamedTuple, TypeVar

from orca_jax.errors import OrcaError
from server.batches.batch import Batch, Status
from server.batches.database import store_error
from server.batches.lines import InputLine, error_line, result_line
from server.batches.results import Result
from server.batches.running import RunningBatch
from server.batches.table import BatchTable
from server.errors import StoreFailed, StoreFull

_LOGGER = logging.getLogger("orca")
_POLL_SECONDS = 0.05  # between two checks whether the engine has room
AGAIN_SECONDS = 1.0  # before a refused line, or work that failed on the disk, is tried again
_MOST_SECONDS = 60.0
_BUSY = frozenset((429, 503))

T = TypeVar("T")


class Answered(NamedTuple):
    """The response to a line's request. `body` is JSON without line breaks."""

    status: int
    request_id: str
    body: bytes


Answer = Callable[[Batch, InputLine], Awaitable[Answered]]


class BatchRunner:
    """Runs batches in the task `run`. Cancelling it ends all lines; batches continue after the next start.

    `answer` answers a line, `room` says how many lines may run now, and `stopping` whether the server is
    ending. `open_batch` runs on `thread`, which does all work on the disk. Failed work is tried again after
    `again_seconds`.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        open_batch: Callable[[Batch], RunningBatch],
        table: BatchTable,
        room: Callable[[], int],
        stopping: Callable[[], bool],
        thread: ThreadPoolExecutor,
        clock: Callable[[], float] = time.time,
        again_seconds: float = AGAIN_SECONDS,
    ) -> None:
        self.answer, self.open, self.table = answer, open_batch, table
        self.stopping, self.clock, self.again_seconds = stopping, clock, again_seconds
        self._room = room
        self._thread = thread
        self._new: deque[Batch] = deque()
        self._works: dict[str, _BatchWork] = {}
        self._opened: set[RunningBatch] = set()  # with open files; used only on the thread
        self._turns: deque[asyncio.Future[None]] = deque()  # of batches with a line to start
        self._changed = asyncio.Event()
        self.n_lines = 0  # lines that are running

    def add(self, batches: Iterable[Batch]) -> None:
        """Run these batches too."""
        self._new.extend(batches)
        self._changed.set()

    def cancelled(self, batch: Batch) -> None:
        """End the lines of a batch that is `cancelling` now. Existing results are kept."""
        work = self._works.get(batch.id)
        if work is not None:
            work.changed.set()

    async def run(self) -> None:
        """Run until the server stops."""
        try:
            while not self.stopping():
                self._changed.clear()
                while self._new:
                    batch = self._new.popleft()
                    self._works[batch.id] = _BatchWork(self, batch)
                self._give_turns()
                try:
                    async with asyncio.timeout(_POLL_SECONDS if self._works else None):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        finally:
            tasks = [work.task for work in self._works.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # The thread may still be busy with a cancelled step, such as opening a batch; this runs after it.
            await self.on_thread(self._close_all)

    def _give_turns(self) -> None:
        while self._turns and self._room() > self.n_lines:
            turn = self._turns.popleft()
            if not turn.done():
                self.n_lines += 1
                turn.set_result(None)

    # Called by _BatchWork.

    async def turn(self) -> None:
        """Wait until one more line may run. Call `end_turn` when it has run."""
        turn = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        self._changed.set()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.end_turn()
            raise

    def end_turn(self) -> None:
        """Let another line run in the place of one that has ended."""
        self.n_lines -= 1
        self._changed.set()

    def ended(self, batch: Batch) -> None:
        """Forget a batch."""
        self._works.pop(batch.id, None)

    async def on_thread(self, work: Callable[[], T]) -> T:
        """The result of work on the disk. Raises StoreFailed where the disk fails."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (OSError, sqlite3.Error) as error:
            raise store_error(error) from error

    def open_files(self, batch: Batch) -> RunningBatch:
        """Open a batch's files. Runs on the thread."""
        opened = self.open(batch)
        self._opened.add(opened)
        return opened

    def finish_files(self, opened: RunningBatch, status: Status) -> None:
        """Finish a batch and close its files. Runs on the thread."""
        opened.finish(status)
        self._opened.remove(opened)

    def _close_all(self) -> None:
        for opened in list(self._opened):
            opened.close()
            self._opened.remove(opened)


class _BatchWork:
    """Runs one batch, in a task of its own."""

    def __init__(self, runner: BatchRunner, batch: Batch) -> None:
        self._runner, self._batch = runner, batch
        self._lines: set[asyncio.Task[None]] = set()
        self._unkept: list[Result] = []  # results to be written together
        self._writing = asyncio.Lock()
        self._failure: Exception | None = None  # why no more lines may start
        self.changed = asyncio.Event()
        self.task = asyncio.create_task(self._run(), name=f"batch {batch.id}")
        self.task.add_done_callback(self._is_over)

    async def _run(self) -> None:
        opened: RunningBatch | None = None
        try:
            opened = await self._until_done(lambda: self._runner.open_files(self._batch))
            await self._work(opened)
        except asyncio.CancelledError:
            await self._end_lines()
            raise
        except Exception as error:
            await self._end_lines()
            await self._fail(opened, error)

    def _is_over(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOGGER.error("the task of batch %s ended", self._batch.id, exc_info=error)
        self._runner.ended(self._batch)

    async def _work(self, opened: RunningBatch) -> None:
        batch = self._batch
        while batch.status == "validating":
            await self._until_done(opened.validate)
        if batch.ended:
            await self._until_done(lambda: self._runner.finish_files(opened, "failed"))
            return
        status = await self._run_lines(opened)
        await self._end_lines()
        if status == "expired":
            await self._until_done(opened.rewind)
            while await self._until_done(opened.expire):
                pass
        if status == "completed":
            await self._until_done(opened.finalize)
        await self._until_done(lambda: self._runner.finish_files(opened, status))

    async def _run_lines(self, opened: RunningBatch) -> Status:
        """Start lines until the batch ends, and return the status that it ends with."""
        runner, batch = self._runner, self._batch
        is_read = False
        while True:
            self.changed.clear()
            if self._failure is not None:
                raise self._failure
            if batch.status == "cancelling":
                return "cancelled"
            if runner.clock() >= batch.expires_at:
                return "expired"
            if is_read and opened.has_more:
                is_read = False
            if is_read and not self._lines:
                return "completed"
            if is_read or not await self._turn_or_change():
                await self._wait()
                continue
            try:
                line = await self._until_done(opened.next_line)
            except BaseException:
                runner.end_turn()
                raise
            if line is None:
                runner.end_turn()
                is_read = True
                continue
            task = asyncio.create_task(self._line(opened, line), name=f"line of {batch.id}")
            self._lines.add(task)
            task.add_done_callback(self._line_is_over)

    async def _turn_or_change(self) -> bool:
        """Wait for this batch's turn; False if something else happened first."""
        turn = asyncio.create_task(self._runner.turn())
        change = asyncio.create_task(self.changed.wait())
        seconds = max(0.0, self._batch.expires_at - self._runner.clock())
        try:
            await asyncio.wait([turn, change], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
            if not turn.done():
                turn.cancel()
                await asyncio.wait([turn])
        return not turn.cancelled()

    async def _wait(self) -> None:
        seconds = max(0.0, self._batch.expires_at - self._runner.clock())
        try:
            async with asyncio.timeout(seconds):
                await self.changed.wait()
        except TimeoutError:
            pass

    def _line_is_over(self, task: asyncio.Task[None]) -> None:
        self._lines.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            assert isinstance(error, Exception)
            self._failure = error
        self._runner.end_turn()
        self.changed.set()

    async def _line(self, opened: RunningBatch, line: InputLine) -> None:
        if line.problem is not None:
            text = error_line(line.custom_id, line.problem.code, str(line.problem))
            await self._keep(opened, Result(line.number, False, text))
            return
        try:
            status, request_id, body = await self._runner.answer(self._batch, line)
        except Exception:
            _LOGGER.exception("a line of batch %s failed", self._batch.id)
            text = error_line(line.custom_id, "server_error", "the server failed in an unexpected way")
            await self._keep(opened, Result(line.number, False, text))
            return
        if status in _BUSY:
            await asyncio.sleep(self._runner.again_seconds)
            await self._runner.on_thread(lambda: opened.give_back(line))
            return
        text = result_line(line.custom_id, status, request_id, body)
        await self._keep(opened, Result(line.number, status < 400, text))

    async def _keep(self, opened: RunningBatch, result: Result) -> None:
        """Write a result, together with others that arrived during the previous write."""
        self._unkept.append(result)
        async with self._writing:
            results, self._unkept = self._unkept, []
            if results:
                await self._until_done(lambda: opened.record(results))

    async def _until_done(self, work: Callable[[], T]) -> T:
        """The result of work on the disk. While the disk fails it is tried again, with growing pauses."""
        for n_failed in count():
            try:
                return await self._runner.on_thread(work)
            except StoreFailed as error:
                seconds = min(self._runner.again_seconds * 2**n_failed, _MOST_SECONDS)
                _LOGGER.warning("batch %s tries again in %g seconds: %s", self._batch.id, seconds, error)
                await asyncio.sleep(seconds)
        raise AssertionError("count() ended")

    async def _end_lines(self) -> None:
        lines = list(self._lines)
        for line in lines:
            line.cancel()
        await asyncio.gather(*lines, return_exceptions=True)

    async def _fail(self, opened: RunningBatch | None, error: Exception) -> None:
        """End the batch as failed, with the results so far."""
        if isinstance(error, OrcaError):
            code = "store_full" if isinstance(error, StoreFull) else "input_gone"
            message = str(error)
        else:
            _LOGGER.error("batch %s failed in an unexpected way", self._batch.id, exc_info=error)
            code, message = "server_error", "the server failed in an unexpected way; its log has more"
        faults = [{"code": code, "line": None, "message": message, "param": None}]

        def end() -> None:
            self._batch.errors = faults
            if opened is None:
                with self._runner.table.changing(self._batch) as changed:
                    changed.become("failed")
            else:
                self._runner.finish_files(opened, "failed")

        await self._until_done(end)
