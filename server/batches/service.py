"""All batches and files of a server, for its routes, and the task that runs the batches."""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from orca_jax.errors import ConfigError, InvalidRequest
from server.batches.batch import Batch, new_batch
from server.batches.database import Database, store_error, unusable
from server.batches.files import FileStore, StoredFile, refuse_older_form
from server.batches.lines import ReadMembers
from server.batches.runner import AGAIN_SECONDS, Answer, BatchRunner
from server.batches.running import RunningBatch
from server.batches.table import BatchTable
from server.errors import StoreFull
from server.gateway.gateway import Gateway, Phase

MAX_BATCHES = 256  # unfinished, of all API keys
MAX_EACH = 32  # unfinished, of one API key
_MAX_ENDED = 1000  # ended ones that are remembered, of one API key
_STOP_SECONDS = 5.0
_FILES, _RESULTS = "files", "batches"

T = TypeVar("T")


class Batches:
    """Batches and files in `folder`, of at most `max_bytes`, for use on the gateway's event loop.

    A line has at most `max_line` bytes. If the server has several API keys (`shared`), each may use half of
    the bytes and of the number of files. Work that failed on the disk or was refused by the engine is tried
    again after `again_seconds`.
    """

    def __init__(
        self,
        gateway: Gateway,
        folder: Path,
        *,
        max_bytes: int,
        max_line: int,
        shared: bool,
        again_seconds: float = AGAIN_SECONDS,
    ) -> None:
        """Read the folder. Raises ConfigError, and then nothing in it has changed."""
        self.max_line = max_line
        self._again_seconds = again_seconds
        self._gateway = gateway
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        max_each = max_bytes // 2 if shared else max_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            refuse_older_form(folder, (_FILES, _RESULTS))
            self._database = Database(folder)
        except OSError as error:
            raise unusable(folder, error) from error
        try:
            self.files = FileStore(folder / _FILES, self._database, max_bytes=max_bytes, max_each=max_each)
            self.table = BatchTable(folder / _RESULTS, self._database, self.files)
        except (OSError, sqlite3.Error) as error:
            self._database.close()
            raise unusable(folder, error) from error
        except ConfigError:
            self._database.close()
            raise
        self.answer: Answer | None = None  # of lines; set before `start`, like read_members
        self.read_members: ReadMembers | None = None
        self._runner: BatchRunner | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Run the batches, beginning with the unfinished ones in the folder."""
        assert self.answer is not None
        self._runner = BatchRunner(
            self.answer,
            open_batch=self._open,
            table=self.table,
            room=self._room,
            stopping=lambda: self._gateway.phase is Phase.DRAINING,
            thread=self._thread,
            again_seconds=self._again_seconds,
        )
        self._runner.add(self.table.unfinished())
        self._task = asyncio.create_task(self._runner.run(), name="batches")

    async def stop(self) -> None:
        """Stop the running batches, within seconds; they continue after the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=_STOP_SECONDS)
        closed = asyncio.get_running_loop().run_in_executor(self._thread, self._database.close)
        await asyncio.wait([closed], timeout=_STOP_SECONDS)
        self._thread.shutdown(wait=False)

    async def on_disk(self, work: Callable[[], T]) -> T:
        """Do work on the files, on their thread. Raises StoreFailed if the disk fails."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (OSError, sqlite3.Error) as error:
            raise store_error(error) from error

    async def create(
        self,
        *,
        tenant: str,
        owner: str,
        endpoint: str,
        input_file: StoredFile,
        metadata: dict[str, str] | None,
    ) -> Batch:
        """Create a batch. Raises StoreFull if too many are unfinished, and StoreFailed."""
        assert self._runner is not None
        names = {"tenant": tenant, "owner": owner, "endpoint": endpoint}
        batch = new_batch(**names, input_file_id=input_file.id, metadata=metadata)

        def add() -> None:  # on the disk's thread, which adds one batch at a time
            unfinished = self.table.unfinished()
            n_yours = sum(batch.tenant == tenant for batch in unfinished)
            if n_yours >= MAX_EACH:
                message = f"{n_yours} of your batches are unfinished, and {MAX_EACH} are allowed"
                raise StoreFull(f"{message}; wait until one has ended")
            if len(unfinished) >= MAX_BATCHES:
                message = f"{MAX_BATCHES} batches of all clients are unfinished, the limit"
                raise StoreFull(f"{message}; try again later")
            self.files.get(input_file.id, tenant)  # it may have been deleted meanwhile
            ended = [one for one in self.table.of(tenant) if one.ended][_MAX_ENDED:]
            self.table.add(batch, instead_of=ended)

        await self.on_disk(add)
        self._runner.add([batch])
        return batch

    async def cancel(self, batch: Batch) -> None:
        """Cancel a batch. Raises InvalidRequest if it has ended, and StoreFailed."""
        assert self._runner is not None

        def change() -> None:
            if batch.ended:
                message = f"the batch has ended: it is {batch.status}, and cannot be cancelled"
                raise InvalidRequest(message, param="batch_id")
            if batch.status != "cancelling":
                with self.table.changing(batch) as changed:
                    changed.become("cancelling")

        await self.on_disk(change)
        self._runner.cancelled(batch)

    async def delete_file(self, stored: StoredFile) -> None:
        """Delete a file. Raises InvalidRequest if it is the input of an unfinished batch, and StoreFailed."""

        def delete() -> None:
            user = next((one for one in self.table.unfinished() if one.input_file_id == stored.id), None)
            if user is not None:
                message = f"the file is the input of batch {user.id}, which has not ended; cancel it first"
                raise InvalidRequest(message, param="file_id")
            self.files.delete(self.files.get(stored.id, stored.tenant))

        await self.on_disk(delete)

    def _room(self) -> int:
        """The number of lines that may run: half of an iteration's places, and none while a request waits."""
        model = self._gateway.served
        if model is None or self._gateway.phase is not Phase.READY or model.orca.pool.n_waiting:
            return 0
        return max(1, model.serving.max_batch_size // 2)

    def _open(self, batch: Batch) -> RunningBatch:
        assert self.read_members is not None
        return RunningBatch(batch, self.files, self.table, max_line=self.max_line, members=self.read_members)
