"""The metrics page of a door: the door's counts, and the pages of all engines merged, labelled by replica."""

import re
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest


class DoorMetrics:
    """The metrics of one door. Use it on the door's event loop."""

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
        """Count a request that has come."""
        self._live.inc()

    def ended(self, status: int, lost: bool = False) -> None:
        """Count a response that has ended."""
        self._live.dec()
        self._answered.labels(str(status)).inc()
        if lost:
            self._lost.inc()

    def page(self, n_engines: int) -> str:
        """Write the door's metrics in Prometheus's text format."""
        self._engines.set(n_engines)
        return generate_latest(self._registry).decode()


_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_COMMENT = re.compile(r"# (?:HELP|TYPE) (\S+)")


def merged(pages: Mapping[str, str]) -> str:
    """Merge the replicas' pages in Prometheus's text format into one.

    The samples of a metric are together, as the format requires; its help is that of the first page.
    """
    comments = dict[str, list[str]]()
    samples = dict[str, list[str]]()
    for replica, page in pages.items():
        for metric, line in _lines(page):
            known = comments.setdefault(metric, [])
            if not line.startswith("#"):
                samples.setdefault(metric, []).append(_labelled(line, replica))
            elif metric not in samples and len(known) < 2:
                known.append(line)
    lines = (line for metric in comments for line in (*comments[metric], *samples.get(metric, ())))
    return "".join(f"{line}\n" for line in lines)


def _lines(page: str) -> Iterator[tuple[str, str]]:
    """Yield each line with its metric; a metric begins with its comments."""
    metric = ""
    for line in page.split("\n"):
        if comment := _COMMENT.match(line):
            metric = comment[1]
        if line and (comment or not line.startswith("#")):
            yield metric, line


def _labelled(sample: str, replica: str) -> str:
    name = _NAME.match(sample)
    assert name is not None, sample
    rest = sample[name.end() :]
    if not rest.startswith("{"):
        return f'{name[0]}{{replica="{replica}"}}{rest}'
    comma = "" if rest.startswith("{}") else ","
    return f'{name[0]}{{replica="{replica}"{comma}{rest[1:]}'
