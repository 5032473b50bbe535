"""What routers and autoscalers see of a server besides its endpoints: metrics, capacity, K/V events."""

from typing import TYPE_CHECKING

from server.commands.capacity import PredictedCapacity, capacity_of
from server.commands.notes import Notes
from server.gateway.served_model import ServedModel
from server.kv_events.start import kv_publisher
from server.metrics.metrics import Metrics
from server.settings.serve_settings import ServeSettings

if TYPE_CHECKING:
    from orca_jax import LLM


class RouterView:
    """Binds the addresses of K/V events when it is made, so that one in use is reported at once.

    `open` begins to show a loaded model, and may take seconds; `close` ends the events, in seconds at most.
    Both may run on any thread. Raises ConfigError.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._publisher = kv_publisher(settings.routing)

    def open(self, llm: "LLM", model: ServedModel, metrics: Metrics, notes: Notes) -> None:
        """Attach the metrics to the model, and publish its prefix cache. Call it while no request is live."""
        others = [PredictedCapacity(capacity_of(llm, self._settings, notes), model.name).collect]
        if self._publisher is not None:
            self._publisher.start(model.service.scheduler.kv)
            others.append(self._publisher.collect)
        metrics.attach(model, *others)

    def close(self) -> None:
        """A second call does nothing."""
        if self._publisher is not None:
            self._publisher.close()
