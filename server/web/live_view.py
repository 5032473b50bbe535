"""What the routes of the live view need."""

from dataclasses import dataclass
from pathlib import Path

from server.gateway.gateway import Gateway
from server.settings.serve_settings import ServeSettings
from server.web.feed import LiveFeed


@dataclass(frozen=True, slots=True)
class LiveView:
    """The feed, the file that is being recorded, and whether several parties have keys to the server."""

    feed: LiveFeed
    recording: Path | None = None
    is_shared: bool = False

    @classmethod
    def of(cls, gateway: Gateway, settings: ServeSettings) -> "LiveView":
        shared = settings.api_keys.n_keys > 1
        record = settings.engine.record
        return cls(LiveFeed(gateway, shows_ids=not shared), None if record is None else Path(record), shared)
