"""The tasks that run batches and uploads, cancelled at any work on the disk, or with one that fails."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from server.batches.batch import Batch, new_batch
from server.batches.database import Database
from server.batches.files import FileStore
from server.batches.lines import InputLine
from server.batches.runner import Answer, Answered, BatchRunner
from server.batches.running import RunningBatch
from server.batches.table import BatchTable
from server.errors import StoreFailed
from server.http.batches.files import _Upload
from server.http.bodies.json_text import members
from tests.endpoint.batches.test_batches import COMPLETIONS, lines_of
from tests.endpoint.harness import until_here

SECONDS = 20.0  # for everything here


class Disk:
    """A store with an input, and what the runner opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = Database(folder)
        self.store = FileStore(folder / "files", self.database, max_bytes=1 << 20, max_each=1 << 20)
        self.table = BatchTable(folder / "batches", self.database, self.store)
        self.opened: list[RunningBatch] = []

    def batch(self, n_lines: int = 1) -> Batch:
        growing = self.store.begin("")
        growing.write(lines_of(COMPLETIONS, [{}] * n_lines))
        names = {"tenant": "", "owner": "", "endpoint": COMPLETIONS}
        batch = new_batch(**names, input_file_id=growing.finish("in.jsonl", "batch").id, metadata=None)
        self.table.add(batch)
        return batch

    def open(self, batch: Batch) -> RunningBatch:
        self.opened.append(RunningBatch(batch, self.store, self.table, max_line=1 << 20, members=members))
        return self.opened[-1]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    disk.database.close()


def open_below(folder: Path) -> set[str]:
    """The files with contents that this process has open."""
    names = set[str]()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of another thread, closed meanwhile
            names.add(os.readlink(entry))
    return {name for name in names if name.startswith((f"{folder}/files", f"{folder}/batches"))}


async def answered(_batch: Batch, line: InputLine) -> Answered:
    return Answered(200, "id", b"{}")


def runner_of(
    disk: Disk, thread: ThreadPoolExecutor, answer: Answer = answered, room: int = 1
) -> BatchRunner:
    return BatchRunner(
        answer,
        open_batch=disk.open,
        table=disk.table,
        room=lambda: room,
        stopping=lambda: False,
        thread=thread,
        again_seconds=0.01,
    )


def run_all(disk: Disk, batches: list[Batch], answer: Answer = answered, room: int = 1) -> None:
    """Run the batches until all have ended, and stop."""

    async def scenario() -> None:
        with ThreadPoolExecutor(1) as thread:
            runner = runner_of(disk, thread, answer, room)
            task = asyncio.create_task(runner.run())
            runner.add(batches)
            await until_here(lambda: all(batch.ended for batch in batches) or task.done())
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert runner.n_lines == 0

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


class Gated(ThreadPoolExecutor):
    """Holds piece of work number `n_held`, before or in the middle of it, until `go_on` is set."""

    def __init__(self, n_held: int, *, is_begun: bool) -> None:
        super().__init__(1)
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._n_held, self._is_begun = n_held, is_begun
        self.n_submitted = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.n_submitted += 1
        if self.n_submitted - 1 != self._n_held:
            return super().submit(fn, *args, **kwargs)
        if not self._is_begun:
            super().submit(self._wait)
            return super().submit(fn, *args, **kwargs)

        def begun() -> Any:
            self._wait()
            return fn(*args, **kwargs)

        return super().submit(begun)

    def _wait(self) -> None:
        self.reached.set()
        assert self.go_on.wait(SECONDS)


@pytest.mark.parametrize("is_begun", [True, False])
@pytest.mark.parametrize("n_held", range(7))
def test_a_stop_at_any_work_on_the_disk_leaves_no_file_open(disk: Disk, n_held: int, is_begun: bool) -> None:
    """Pieces: open, validate twice, read a line, record its result, find no other, finalize, finish."""

    async def scenario() -> None:
        with Gated(n_held, is_begun=is_begun) as thread:
            runner = runner_of(disk, thread)
            task = asyncio.create_task(runner.run())
            runner.add([disk.batch()])
            await until_here(thread.reached.is_set)
            task.cancel()
            await until_here(lambda: thread.n_submitted == n_held + 2)  # the runner closes what is open
            thread.go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))
    assert len(disk.opened) == (n_held > 0 or is_begun)
    assert not open_below(disk.folder)


def test_a_disk_that_fails_for_a_while_delays_its_batch_alone(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = disk.batch(3), disk.batch(3)
    n_left = {first.id: 5, second.id: 0}  # failures, of any work on results
    record = RunningBatch.record

    def failing(self: RunningBatch, results: Any) -> None:
        if n_left[self.batch.id]:
            n_left[self.batch.id] -= 1
            raise OSError("No space left on device")
        record(self, results)

    monkeypatch.setattr(RunningBatch, "record", failing)
    run_all(disk, [first, second])
    assert (first.status, first.completed, second.status, second.completed) == (*("completed", 3) * 2,)
    assert n_left == {first.id: 0, second.id: 0}


def test_a_mistake_in_one_batch_ends_it_alone(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = disk.batch(), disk.batch(2)
    following = RunningBatch.next_line

    def broken(self: RunningBatch) -> InputLine | None:
        if self.batch is first:
            raise RuntimeError("a mistake")
        return following(self)

    monkeypatch.setattr(RunningBatch, "next_line", broken)
    run_all(disk, [first, second])
    assert (first.status, second.status, second.completed) == ("failed", "completed", 2)
    assert first.errors[0]["code"] == "server_error" and "a mistake" in caplog.text


def test_a_line_that_can_no_longer_be_read_fails_alone(disk: Disk) -> None:
    """A power cut may leave a page of zeros in an input that was valid."""
    batch = disk.batch(3)
    (content,) = (disk.folder / "files").glob("*.data")

    async def damaged(batch: Batch, line: InputLine) -> Answered:
        if line.number == 0:
            lines = content.read_bytes().splitlines(keepends=True)
            lines[1] = b"\0" * (len(lines[1]) - 1) + b"\n"
            content.write_bytes(b"".join(lines))
        return Answered(200, "id", b"{}")

    spaces = b" " * (1 << 16)  # more than a reader's buffer
    content.write_bytes(content.read_bytes().replace(b"}\n", b"}" + spaces + b"\n"))
    run_all(disk, [batch], damaged)
    assert (batch.status, batch.completed, batch.failed) == ("completed", 2, 1)
    assert batch.error_file_id is not None
    with disk.store.open(disk.store.get(batch.error_file_id, "")) as file:
        assert b'"invalid_json_line"' in file.read()


def test_an_expired_batch_has_a_result_for_each_line(disk: Disk) -> None:
    """This includes lines that were running when the batch expired."""
    batch = disk.batch(7)
    begun = asyncio.Event()

    async def slow(batch: Batch, line: InputLine) -> Answered:
        if line.number == 0:
            return Answered(200, "id", b"{}")
        batch.expires_at = 0
        begun.set()
        await asyncio.sleep(SECONDS)
        raise AssertionError

    run_all(disk, [batch], slow, room=3)
    assert (batch.status, batch.completed, batch.failed) == ("expired", 1, 6)


def test_lines_of_several_batches_take_turns(disk: Disk) -> None:
    batches = [disk.batch(6), disk.batch(6), disk.batch(6)]
    order: list[int] = []

    async def noted(batch: Batch, line: InputLine) -> Answered:
        order.append(batches.index(batch))
        return Answered(200, "id", b"{}")

    run_all(disk, batches, noted)
    for n in range(3, 16):
        counts = [order[:n].count(i) for i in range(3)]
        assert max(counts) - min(counts) <= 3, order


@pytest.mark.parametrize("is_begun", [True, False])
def test_an_upload_that_is_cancelled_as_it_begins_leaves_no_file(disk: Disk, is_begun: bool) -> None:
    async def scenario() -> None:
        with Gated(0, is_begun=is_begun) as thread:

            async def on_disk(work: Callable[[], Any]) -> Any:
                return await asyncio.get_running_loop().run_in_executor(thread, work)

            upload = _Upload(cast(Any, SimpleNamespace(files=disk.store, on_disk=on_disk)), "")
            task = asyncio.create_task(upload._begin("a.jsonl"))
            await until_here(thread.reached.is_set)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            thread.go_on.set()
            await on_disk(upload.drop)
            assert task.cancelled()

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))
    assert (len(disk.store), disk.store.n_bytes) == (0, 0)
    assert not list((disk.folder / "files").iterdir())


def test_a_disk_that_fails_is_an_error_of_the_request(tmp_path: Path) -> None:
    """A batch that could not be written does not exist."""

    async def scenario() -> None:
        disk = Disk(tmp_path)
        with ThreadPoolExecutor(1) as thread:
            runner = runner_of(disk, thread)

            def failing() -> None:
                raise OSError(28, "No space left on device")

            with pytest.raises(StoreFailed, match="No space left on device"):
                await runner.on_thread(failing)
        disk.database.close()

    asyncio.run(scenario())
