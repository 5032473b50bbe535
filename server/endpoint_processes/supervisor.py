"""Starts the endpoint processes, starts those again that end, and tells them how the engine is."""

import asyncio
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from orca_jax.service.orca import Orca
from server.endpoint_processes.engine_side import EngineSide
from server.endpoint_processes.line import Line
from server.endpoint_processes.messages import (
    AdapterFacts,
    Begin,
    Counts,
    Drain,
    Drained,
    Loaded,
    Report,
    Status,
)
from server.gateway.served_model import ServedModel
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions

_LOGGER = logging.getLogger("orca.endpoints")
_MODULE = "server.endpoint_processes.main"
_LOOK_SECONDS = 0.25  # between two looks at the service
_SILENT_SECONDS = 60.0  # a process that reports nothing for so long is ended
_FOLLOWED_SECONDS = 2.0  # for all processes to follow a status
_END_SECONDS = 5.0  # for a process to end when its line closes
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds before a process is started again


class _Process:
    """One endpoint process while it runs, its line, and once there is a model the engine's side of that."""

    def __init__(self, index: int, process: asyncio.subprocess.Process, end: socket.socket) -> None:
        self.index = index
        self.process = process
        self.line = Line(end, str(index))
        self.side: EngineSide | None = None
        self.reader: threading.Thread | None = None
        self.n_live = 0
        self.n_ended = 0  # requests that its end cut short
        self.followed = 0  # the number of the newest status that it follows
        self.heard = asyncio.get_running_loop().time()

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()


class EndpointProcesses:
    """The endpoint processes of one server, on one event loop. `on_answered` gets the counts of a report."""

    def __init__(
        self, options: EndpointOptions, api_keys: ApiKeys, *, on_answered: Callable[[Counts], object]
    ) -> None:
        self._options = options
        self._api_keys = api_keys
        self._on_answered = on_answered
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, _Process] = {}
        self._keeping: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None
        self._service: Orca | None = None
        self._loaded: Loaded | None = None
        self._status = Status()
        self._changed = asyncio.Event()  # a process follows another status
        self._drain: Drain | None = None

    @property
    def n_live(self) -> int:
        """Requests of all processes whose clients have not received all output yet."""
        return sum(process.n_live for process in self._running.values())

    @property
    def pids(self) -> Sequence[int]:
        return [process.process.pid for process in self._running.values()]

    async def start(self, listener: socket.socket, others_at: str) -> None:
        """Start the processes, which accept connections on `listener`; `others_at` is as in Begin.

        Raises OSError if a process cannot be started.
        """
        n = self._options.endpoint_processes
        # Each takes its part of the connections.
        options = replace(self._options, max_connections=-(-self._options.max_connections // n))
        begin = Begin(options=options, api_keys=self._api_keys, others_at=others_at)
        for index in range(1, n + 1):
            await self._begin(index, listener, begin)
        self._keeping = [
            asyncio.create_task(self._keep(index, listener, begin), name=f"endpoint process {index}")
            for index in range(1, n + 1)
        ]
        self._watching = asyncio.create_task(self._watch(), name="endpoint processes")

    def open(self, model: ServedModel) -> None:
        """Take requests for the model, which is loaded and warm."""
        self._service = model.orca
        self._service.on_published = self._flush
        self._loaded = Loaded(
            name=model.name,
            config=model.config,
            serving=model.serving,
            tokenizer=model.tokenizer,
            chat_template=model.chat_template,
            tool_format=model.tool_format,
            reasoning_format=model.reasoning_format,
            defaults=model.defaults,
            shows_versions=model.shows_versions,
            pooling=model.service.pooling,
            created=model.created,
        )
        self._status = self._look()
        for process in self._running.values():
            self._open(process)

    async def settle(self) -> bool:
        """Wait two seconds at most until all processes follow the present status; False if one does not."""
        if self._service is None:
            return True
        self._tell()
        number = self._status.number
        try:
            async with asyncio.timeout(_FOLLOWED_SECONDS):
                while not self._follow(number):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def drain(self, seconds: float) -> int:
        """Let the processes take no more requests, and wait until they have ended, for some `seconds`.

        Returns how many requests had to be ended.
        """
        self._drain = Drain(seconds)
        for process in self._running.values():
            process.line.send(self._drain)
        processes = list(self._running.values())
        if self._keeping:
            await asyncio.wait(self._keeping, timeout=seconds + 2 * _END_SECONDS)
        return sum(process.n_ended for process in processes)

    async def stop(self) -> None:
        """End all processes and tasks."""
        self._drain = self._drain or Drain(0.0)
        tasks = [*self._keeping, *([] if self._watching is None else [self._watching])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for process in list(self._running.values()):
            await self._close(process)

    def _follow(self, number: int) -> bool:
        running = self._running.values()
        return len(running) == self._options.endpoint_processes and all(
            process.followed >= number for process in running
        )

    # One process.

    async def _begin(self, index: int, listener: socket.socket, begin: Begin) -> None:
        ours, theirs = socket.socketpair()
        try:
            command = (sys.executable, "-m", _MODULE, str(theirs.fileno()), str(listener.fileno()))
            started = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), listener.fileno()),
                start_new_session=True,  # Ctrl-C reaches only this process
                env={**os.environ, "JAX_PLATFORMS": "cpu"},  # it never computes
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        process = self._running[index] = _Process(index, started, ours)
        process.line.send(begin)
        self._open(process)

    def _open(self, process: _Process) -> None:
        if self._loaded is None or self._service is None:
            return
        process.line.send(self._loaded)
        process.line.send(self._status)
        process.heard = self._loop.time()
        process.side = EngineSide(
            process.line,
            self._service,
            str(process.index),
            on_report=lambda report: self._loop.call_soon_threadsafe(self._reported, process, report),
            on_drained=lambda drained: self._loop.call_soon_threadsafe(self._drained, process, drained),
            on_seen=lambda number: self._loop.call_soon_threadsafe(self._seen, process, number),
        )
        process.reader = threading.Thread(
            target=self._read,
            args=(process, process.side),
            name=f"orca-endpoint-{process.index}",
            daemon=True,
        )
        process.reader.start()

    def _read(self, process: _Process, side: EngineSide) -> None:
        """Handle the line's messages on a thread. A process whose line ends is of no more use."""
        try:
            side.serve()
        finally:
            try:
                self._loop.call_soon_threadsafe(process.kill)
            except RuntimeError:  # the event loop is closed
                pass

    async def _keep(self, index: int, listener: socket.socket, begin: Begin) -> None:
        """Start the process again whenever it ends."""
        pause = _FIRST_PAUSE
        while True:
            process, began = self._running[index], self._loop.time()
            status = await process.process.wait()
            await self._close(process)
            n_lost = 0 if process.side is None else process.side.n_left
            if self._drain is not None:
                return
            if self._loop.time() - began > 60.0:
                pause = _FIRST_PAUSE
            _LOGGER.error(
                "endpoint process %d (pid %d) ended with status %d, and %d requests with it; another one "
                "is started in %g s",
                *(index, process.process.pid, status, n_lost, pause),
            )
            await asyncio.sleep(pause)
            if self._drain is not None:
                return
            pause = min(2 * pause, _LONGEST_PAUSE)
            await self._begin(index, listener, begin)

    async def _close(self, process: _Process) -> None:
        await asyncio.to_thread(process.line.close)
        try:
            async with asyncio.timeout(_END_SECONDS):
                await process.process.wait()
        except TimeoutError:
            process.kill()
            await process.process.wait()
        if process.reader is not None:
            await asyncio.to_thread(process.reader.join, _END_SECONDS)
        self._running.pop(process.index, None)
        self._changed.set()

    # What the processes say, on the event loop.

    def _reported(self, process: _Process, report: Report) -> None:
        process.heard = self._loop.time()
        process.n_live = report.n_live
        self._on_answered(report.answered)

    def _drained(self, process: _Process, drained: Drained) -> None:
        process.n_live, process.n_ended = 0, drained.n_ended

    def _seen(self, process: _Process, number: int) -> None:
        process.followed = max(process.followed, number)
        self._changed.set()

    # The service.

    def _flush(self) -> None:
        """Send all processes what was published. On the scheduler's thread."""
        for process in list(self._running.values()):
            if process.side is not None:
                process.side.flush()

    async def _watch(self) -> None:
        """Tell the processes when the service changes, and end those that are silent."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self._service is None:
                continue
            self._tell()
            silent_since = self._loop.time() - _SILENT_SECONDS
            for process in self._running.values():
                if process.heard < silent_since:
                    _LOGGER.error("endpoint process %d has been silent, and is ended", process.index)
                    process.kill()

    def _tell(self) -> None:
        """Send the status if it has changed."""
        status = self._look()
        if status != self._status:
            self._status = status._replace(number=self._status.number + 1)
            for process in self._running.values():
                process.line.send(self._status)

    def _look(self) -> Status:
        service = self._service
        assert service is not None
        wait = service.expected_wait
        return Status(
            number=self._status.number,
            failure=None if service.failure is None else str(service.failure),
            trouble=service.trouble,
            is_paused=service.is_paused,
            is_asleep=service.is_asleep,
            expected_wait=None if wait is None else float(round(wait)),
            adapters=tuple(
                AdapterFacts(one.name, one.version, one.content, one.directory)
                for one in service.adapters.values()
            ),
        )
