"""The feed of the live view: server-sent events that say what the scheduler does.

Each message is made once for all viewers. The feed costs nothing while nobody watches, and what a viewer
leaves unread is bounded: one that stops reading is dropped. docs/pages.md describes the messages.
"""

import asyncio
import json
import secrets
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orca_jax
from server.errors import TooManyViewers
from server.gateway.gateway import Gateway, ServerStatus
from server.gateway.served_model import ServedModel
from server.process.watchdog import Watchdog
from server.settings.serve_settings import ServeSettings
from server.web.watch import Line, StageTimes, Watch

_PERIOD = 0.05  # seconds between two messages
_HEARTBEAT = 10.0  # seconds of silence, after which a comment shows that the connection lives
_MOST_VIEWERS = 64
_MOST_UNREAD = 1 << 20  # bytes that wait for one viewer
_MOST_REQUESTS = 1024  # live requests in a hello


class Viewer:
    """An async iterator of messages. It ends when the feed drops the viewer or closes."""

    def __init__(self) -> None:
        self._unread = deque[bytes]()
        self._n_bytes = 0
        self._woken = asyncio.Event()
        self.ended = False

    def put(self, message: bytes) -> bool:
        """Add a message. If too much is unread the viewer ends, and this returns False."""
        if self._n_bytes + len(message) > _MOST_UNREAD:
            self._unread.clear()
            self.end()
            return False
        self._unread.append(message)
        self._n_bytes += len(message)
        self._woken.set()
        return True

    def end(self) -> None:
        """End once everything unread has been read."""
        self.ended = True
        self._woken.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            if self._unread:
                message = b"".join(self._unread)
                self._unread.clear()
                self._n_bytes = 0
                yield message
            elif self.ended:
                return
            else:
                self._woken.clear()
                await self._woken.wait()


class LiveFeed:
    """All viewers of one server. Use it on the gateway's event loop.

    With `shows_ids` False the messages leave out the requests' ids: viewers may not be those who chose them.
    With a `watchdog` there is a message for each of its long holds.
    """

    def __init__(self, gateway: Gateway, *, shows_ids: bool = True, watchdog: Watchdog | None = None) -> None:
        self._gateway = gateway
        self._watchdog = watchdog
        self._n_holds = 0  # those sent so far
        self._shows_ids = shows_ids
        self._run_id = secrets.token_hex(8)  # another run counts requests and iterations from 0
        self._viewers: list[Viewer] = []
        self._pump: asyncio.Task[None] | None = None
        self._model: ServedModel | None = None  # the watched one
        self._watch: Watch | None = None
        self._stage_times: StageTimes | None = None
        self._status: ServerStatus | None = None  # last sent

    @property
    def n_viewers(self) -> int:
        return len(self._viewers)

    def join(self) -> Viewer:
        """Add a viewer, which must `leave`. Raises TooManyViewers."""
        if len(self._viewers) >= _MOST_VIEWERS:
            raise TooManyViewers(f"{_MOST_VIEWERS} people watch already; try again later")
        self._flush()
        self._look_for_model()
        viewer = Viewer()
        viewer.put(self._hello())
        if not self._viewers and self._watchdog is not None:
            _, self._n_holds = self._watchdog.since(self._n_holds)
        self._viewers.append(viewer)
        if self._pump is None:
            self._pump = asyncio.create_task(self._run(), name="live feed")
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Remove a viewer."""
        viewer.end()
        if viewer in self._viewers:
            self._viewers.remove(viewer)
        if not self._viewers:
            self._rest()

    async def close(self) -> None:
        """End the streams of all viewers."""
        pump = self._pump
        for viewer in list(self._viewers):
            self.leave(viewer)
        if pump is not None:
            await asyncio.wait([pump])

    def _rest(self) -> None:
        """Stop watching the scheduler, now that nobody is there."""
        if self._pump is not None:
            self._pump.cancel()
            self._pump = None
        if self._watch is not None:
            self._watch.stop()
        self._model = self._watch = self._stage_times = self._status = None

    async def _run(self) -> None:
        silent = 0.0
        while True:
            await asyncio.sleep(_PERIOD)
            silent = 0.0 if self._flush() else silent + _PERIOD
            if self._look_for_model():
                self._send(self._hello())
            if silent > _HEARTBEAT:
                self._send(b": nothing happens\n\n")
                silent = 0.0

    def _look_for_model(self) -> bool:
        """Begin to watch a model that has been loaded; True if this call did."""
        model = self._gateway.served
        if model is None or model is self._model:
            return False
        self._model = model
        self._watch = Watch(model.orca, shows_ids=self._shows_ids)
        self._watch.start()
        self._stage_times = StageTimes(model)
        return True

    def _flush(self) -> bool:
        """Send what has happened since the last call; False if nothing has."""
        lines: list[Line] = []
        if self._watch is not None and self._stage_times is not None:
            lines = self._watch.take() + self._stage_times.lines(self._now())
        if self._watchdog is not None and self._viewers:
            holds, self._n_holds = self._watchdog.since(self._n_holds)
            for hold in holds:
                ended = self._now() - (self._watchdog.clock() - hold.ended)
                lines.append({"hold": hold.what, "seconds": hold.seconds, "time": ended})
        status = self._gateway.status
        if self._status is not None and status != self._status:
            lines.append({"status": status.phase, "reason": status.reason, "time": self._now()})
        self._status = status
        if lines:
            self._send(_event("lines", lines))
        return bool(lines)

    def _send(self, message: bytes) -> None:
        for viewer in list(self._viewers):
            if not viewer.put(message):
                self._viewers.remove(viewer)
        if not self._viewers:
            self._rest()

    def _now(self) -> float:
        """Read the timeline's clock, in seconds."""
        assert self._model is not None or self._watch is None
        return 0.0 if self._model is None else self._model.orca.timeline.now()

    def _hello(self) -> bytes:
        status = self._gateway.status
        hello: Line = {
            "orca_live": 1,
            "version": orca_jax.__version__,
            "run": self._run_id,
            "now": self._now(),
            "shows_ids": self._shows_ids,
            "status": status.phase,
            "reason": status.reason,
            **_sizes(self._model),
            "requests": [] if self._watch is None else self._watch.live_requests(_MOST_REQUESTS),
        }
        return _event("hello", hello)


@dataclass(frozen=True, slots=True)
class LiveView:
    """The state that the routes under /live/ share.

    `recording` is the file that the server records into. `is_shared` is True where several API keys exist:
    their owners must not see one another's requests.
    """

    feed: LiveFeed
    recording: Path | None = None
    is_shared: bool = False

    @classmethod
    def of(cls, gateway: Gateway, settings: ServeSettings, watchdog: Watchdog | None = None) -> "LiveView":
        shared = settings.api_keys.n_keys > 1
        record = settings.engine.record
        feed = LiveFeed(gateway, shows_ids=not shared, watchdog=watchdog)
        return cls(feed, None if record is None else Path(record), shared)


def _sizes(model: ServedModel | None) -> Line:
    """Describe the model and the sizes of its engine; all None while it loads."""
    if model is None:
        names = ("model", "policy", "scheduling_policy", "n_workers", "max_batch_size", "n_slots", "n_states")
        return dict.fromkeys(
            (
                *names,
                "n_snapshots",
                "n_host_blocks",
                "n_host_states",
                "block_size",
                "max_batch_tokens",
                "buckets",
            )
        )
    serving = model.serving
    return {
        "model": model.name,
        "policy": serving.scheduling.policy,
        "scheduling_policy": serving.scheduling.scheduling_policy,
        "n_workers": model.orca.scheduler.engine.n_workers,
        "max_batch_size": serving.max_batch_size,
        "n_slots": serving.n_slots,
        "n_states": model.orca.scheduler.kv.n_rows if model.config.has_state else 0,
        "n_snapshots": serving.n_snapshots,
        "n_host_blocks": serving.n_host_blocks,
        "n_host_states": serving.n_host_states,
        "block_size": serving.block_size,
        "max_batch_tokens": serving.max_batch_tokens,
        "buckets": list(model.orca.timeline.bucket_sizes),
    }


def _event(name: str, data: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
