"""What a door counts itself; the engines' metrics are in its page too (door.py)."""

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest


class DoorMetrics:
    """One door's metrics. Use it on the door's event loop."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._answered = Counter(
            "orca_door_requests",
            "HTTP requests answered by a door; 499: the client left.",
            ["status"],
            registry=self._registry,
        )
        self._lost = Counter(
            "orca_door_lost_engines",
            "Requests that ended with an error because their engine was gone.",
            registry=self._registry,
        )
        self._live = Gauge(
            "orca_door_live_requests", "Requests that a door has not answered yet.", registry=self._registry
        )
        self._engines = Gauge(
            "orca_door_engines", "Engines whose metrics are on this page.", registry=self._registry
        )

    def began(self) -> None:
        """A request has come."""
        self._live.inc()

    def ended(self, status: int, lost: bool = False) -> None:
        """Its response is over."""
        self._live.dec()
        self._answered.labels(str(status)).inc()
        if lost:
            self._lost.inc()

    def page(self, n_engines: int) -> str:
        """All in Prometheus's text format."""
        self._engines.set(n_engines)
        return generate_latest(self._registry).decode()
