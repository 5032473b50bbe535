"""The task that runs batches and an upload, cancelled at any work on the disk, and with a disk that fails."""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from server.batches import files
from server.batches.batch import Batch, new_batch
from server.batches.files import FileStore
from server.batches.lines import InputLine
from server.batches.runner import Answered, BatchRunner
from server.batches.running import RunningBatch
from server.http.batches.files import _Upload
from tests.endpoint.batches.test_batches import COMPLETIONS, lines_of
from tests.endpoint.harness import until_here

SECONDS = 20.0  # for everything here


class Disk:
    """A store with an input of one line, and what the runner opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = FileStore(folder / "files", max_bytes=1 << 20, max_each=1 << 20)
        growing = self.store.begin("")
        growing.write(lines_of(COMPLETIONS, [{}]))
        self.input = growing.finish("in.jsonl", "batch")
        self.opened: list[RunningBatch] = []

    def batch(self) -> Batch:
        names = {"tenant": "", "owner": "", "endpoint": COMPLETIONS}
        return new_batch(**names, input_file_id=self.input.id, metadata=None)

    def open(self, batch: Batch) -> RunningBatch:
        self.opened.append(
            RunningBatch(batch, self.store, self.folder / f"{batch.id}.json", max_line=1 << 20)
        )
        return self.opened[-1]


def sizes(store: FileStore, folder: Path) -> tuple[int, int]:
    """Files and bytes as the store counts them, which must be those on the disk."""
    on_disk = [path.stat().st_size for path in (folder / "files").iterdir() if path.suffix != ".json"]
    assert (len(store), store.n_bytes) == (len(on_disk), sum(on_disk))
    return len(store), store.n_bytes


def open_below(folder: Path) -> list[str]:
    """The files below `folder` that this process has open."""
    names: list[str] = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of another thread, closed meanwhile
            names.append(os.readlink(entry))
    return [name for name in names if name.startswith(f"{folder}/")]


async def answered(_batch: Batch, line: InputLine) -> Answered:
    return Answered(200, "id", b"{}")


def runner_of(thread: ThreadPoolExecutor, open_batch: Callable[[Batch], RunningBatch]) -> BatchRunner:
    return BatchRunner(
        answered,
        open_batch=open_batch,
        save=lambda batch: None,
        room=lambda: 1,
        stopping=lambda: False,
        thread=thread,
    )


def run_all(disk: Disk, batches: list[Batch]) -> None:
    """Run them until the last is completed, and stop."""

    async def scenario() -> None:
        with ThreadPoolExecutor(1) as thread:
            runner = runner_of(thread, disk.open)
            task = asyncio.create_task(runner.run())
            runner.add(batches)
            await until_here(lambda: batches[-1].status == "completed" or task.done())
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


class Gated(ThreadPoolExecutor):
    """Holds work number `n_held`, before it or in the middle of it, until `go_on` is set."""

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
@pytest.mark.parametrize("n_held", range(6))
def test_a_stop_at_any_work_on_the_disk_leaves_no_file_open(
    tmp_path: Path, n_held: int, is_begun: bool
) -> None:
    """It opens the batch, validates it, reads a line, records its result, finds no other, and finishes."""
    disk = Disk(tmp_path)

    async def scenario() -> None:
        with Gated(n_held, is_begun=is_begun) as thread:
            runner = runner_of(thread, disk.open)
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
    assert not open_below(tmp_path)


def test_a_disk_that_fails_at_the_end_of_a_batch_fails_this_batch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path)
    first, second, third = disk.batch(), disk.batch(), disk.batch()
    n_left = {first.id: 1, second.id: 9, third.id: 0}  # failures, of what follows the validation
    save = RunningBatch.save

    def failing(self: RunningBatch) -> None:
        if self.batch.ended and n_left[self.batch.id]:
            n_left[self.batch.id] -= 1
            raise OSError("No space left on device")
        save(self)

    monkeypatch.setattr(RunningBatch, "save", failing)
    run_all(disk, [first, second, third])
    assert first.status == second.status == "failed"
    assert first.errors[0]["message"] == "No space left on device"
    assert third.status == "completed" and third.output_file_id is not None
    assert n_left == {first.id: 0, second.id: 7, third.id: 0}


def test_a_result_file_that_cannot_be_kept_is_removed_and_counted_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path)
    before = sizes(disk.store, tmp_path)
    write, n_left = files.write_whole, 1

    def failing(path: Path, value: object) -> None:
        nonlocal n_left
        if n_left:
            n_left -= 1
            raise OSError("No space left on device")
        write(path, value)

    monkeypatch.setattr(files, "write_whole", failing)
    first, second = disk.batch(), disk.batch()
    run_all(disk, [first, second])
    assert (first.status, first.output_file_id, second.status) == ("failed", None, "completed")
    n_files, n_bytes = sizes(disk.store, tmp_path)
    kept = disk.store.get(second.output_file_id or "", "")
    assert (n_files, n_bytes) == (before[0] + 1, before[1] + kept.n_bytes)


@pytest.mark.parametrize("is_begun", [True, False])
def test_an_upload_that_is_cancelled_as_it_begins_leaves_no_file(tmp_path: Path, is_begun: bool) -> None:
    disk = Disk(tmp_path)
    before = sizes(disk.store, tmp_path)

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
    assert sizes(disk.store, tmp_path) == before
    assert not [path for path in (tmp_path / "files").iterdir() if path.suffix == ".growing"]
