"""All of a server's batches and files: what its routes use, and the task that runs the batches."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from orca_jax.errors import ConfigError, InvalidRequest
from server.batches.batch import Batch, new_batch
from server.batches.files import FileStore, StoredFile, write_whole
from server.batches.runner import Answer, BatchRunner
from server.batches.running import RunningBatch
from server.errors import StoreFull, UnknownBatch
from server.gateway.gateway import Gateway, Phase

MAX_BATCHES = 256  # unfinished, of all API keys
MAX_EACH = 32  # unfinished, of one
_MAX_ENDED = 1000  # remembered, of one
_STOP_SECONDS = 5.0

T = TypeVar("T")


class Batches:
    """Batches and files in `folder`, of at most `max_bytes`; `shared` says that there are several API keys.

    Use it on the gateway's loop. A line is at most `max_line` bytes. With several keys each may fill half.
    """

    def __init__(
        self, gateway: Gateway, folder: Path, *, max_bytes: int, max_line: int, shared: bool
    ) -> None:
        """Read what is there. Raises ConfigError."""
        self.max_line = max_line
        self._gateway = gateway
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._folder = folder / "batches"
        max_each = max_bytes // 2 if shared else max_bytes
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.files = FileStore(folder / "files", max_bytes=max_bytes, max_each=max_each)
            self._batches = {batch.id: batch for batch in self._read()}
            growing = {name for one in self._unfinished() for name in (one.output_id, one.error_id) if name}
            self.files.forget_growing(growing)
        except OSError as error:
            raise ConfigError(f"batch_dir is {str(folder)!r}, which cannot be used: {error}") from error
        self.answer: Answer | None = None  # of lines; set before `start`
        self._runner: BatchRunner | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Run the batches, those first that are left from before."""
        assert self.answer is not None
        self._runner = BatchRunner(
            self.answer,
            open_batch=self._open,
            save=self._save,
            room=self._room,
            stopping=lambda: self._gateway.phase is Phase.DRAINING,
            thread=self._thread,
        )
        self._runner.add(self._unfinished())
        self._task = asyncio.create_task(self._runner.run(), name="batches")

    async def stop(self) -> None:
        """End what runs, within seconds; it goes on after the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=_STOP_SECONDS)
        self._thread.shutdown(wait=False)

    async def on_disk(self, work: Callable[[], T]) -> T:
        """The result of work on the files, on their thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def of(self, tenant: str) -> list[Batch]:
        """A tenant's batches, the newest first."""
        own = [batch for batch in self._batches.values() if batch.tenant == tenant]
        return sorted(own, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def get(self, batch_id: str, tenant: str) -> Batch:
        """Raises UnknownBatch, also for a batch of another tenant."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.tenant != tenant:
            raise UnknownBatch(f"there is no batch {batch_id[:100]!r}")
        return batch

    async def create(
        self,
        *,
        tenant: str,
        owner: str,
        endpoint: str,
        input_file: StoredFile,
        metadata: dict[str, str] | None,
    ) -> Batch:
        """Raises StoreFull if too many are unfinished."""
        assert self._runner is not None
        unfinished = self._unfinished()
        own = [batch for batch in unfinished if batch.tenant == tenant]
        if len(own) >= MAX_EACH or len(unfinished) >= MAX_BATCHES:
            message = (
                f"{len(own)} batches are unfinished, and {len(unfinished)} of all clients; {MAX_EACH} and "
            )
            raise StoreFull(f"{message}{MAX_BATCHES} are allowed; wait until one has ended")
        names = {"tenant": tenant, "owner": owner, "endpoint": endpoint}
        batch = new_batch(**names, input_file_id=input_file.id, metadata=metadata)
        self._batches[batch.id] = batch
        ended = [one for one in self.of(tenant) if one.ended][_MAX_ENDED:]

        def write() -> None:
            self._save(batch)
            for old in ended:
                self._path(old).unlink(missing_ok=True)

        for old in ended:
            del self._batches[old.id]
        await self.on_disk(write)
        self._runner.add([batch])
        return batch

    async def cancel(self, batch: Batch) -> None:
        """End the batch's lines now. Raises InvalidRequest for one that has ended."""
        assert self._runner is not None
        if batch.ended:
            message = f"the batch has ended: it is {batch.status}, and cannot be cancelled"
            raise InvalidRequest(message, param="batch_id")
        self._runner.cancel(batch)
        await self.on_disk(lambda: self._save(batch))

    async def delete_file(self, stored: StoredFile) -> None:
        """Raises InvalidRequest for the input of a batch that has not ended."""
        user = next((one for one in self._unfinished() if one.input_file_id == stored.id), None)
        if user is not None:
            message = f"the file is the input of batch {user.id}, which has not ended; cancel it first"
            raise InvalidRequest(message, param="file_id")
        await self.on_disk(lambda: self.files.delete(stored))

    def _room(self) -> int:
        """How many lines may run: half of an iteration's places, and none while any request waits."""
        model = self._gateway.served
        if model is None or self._gateway.phase is not Phase.READY or model.service.pool.n_waiting:
            return 0
        return max(1, model.serving.max_batch_size // 2)

    def _open(self, batch: Batch) -> RunningBatch:
        return RunningBatch(batch, self.files, self._path(batch), max_line=self.max_line)

    def _save(self, batch: Batch) -> None:
        write_whole(self._path(batch), batch.stored())

    def _unfinished(self) -> list[Batch]:
        left = [batch for batch in self._batches.values() if not batch.ended]
        return sorted(left, key=lambda batch: (batch.created_at, batch.id))

    def _path(self, batch: Batch) -> Path:
        return self._folder / f"{batch.id}.json"

    def _read(self) -> list[Batch]:
        batches: list[Batch] = []
        for path in sorted(self._folder.glob("batch_*.json")):
            try:
                batches.append(Batch(**json.loads(path.read_text("utf-8"))))
            except (ValueError, TypeError):  # of another version
                continue
        return batches
