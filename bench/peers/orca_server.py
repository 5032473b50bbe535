"""`orca serve` over HTTP, in a separate process that the benchmark starts and ends."""

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Self

import orca_jax
from bench.peers.http_engine import PLAY_SECONDS, HttpEngine
from bench.peers.played import Played
from bench.server.server_process import ServerProcess
from bench.trace import Trace

START_SECONDS = 900.0


class OrcaServer:
    """A server for a checkpoint on a free loopback port; a context manager that ends it.

    `settings` are flags of `orca serve` by their names with underscores, as in {"max_batch_size": 48}.
    """

    def __init__(
        self, name: str, checkpoint: str, settings: Mapping[str, Any], *, play_seconds: float = PLAY_SECONDS
    ) -> None:
        self.name = name
        self.about: dict[str, Any] = {}
        self._flags = as_flags(settings)
        self._play_seconds = play_seconds
        self._process = ServerProcess([checkpoint, *self._flags], compile_ahead=True)
        self._http: HttpEngine | None = None

    def start(self) -> None:
        """Wait until it is ready and set `about`. Raises ServerFailed and AddressFailed."""
        self._process.wait_until_ready(START_SECONDS)
        self._http = HttpEngine(self.name, self._process.url, play_seconds=self._play_seconds)
        self._http.start()
        versions = (
            f"orca_jax {orca_jax.__version__}, jax {version('jax')}, Python {platform.python_version()}"
        )
        about = self._http.about
        self.about = {**about, "versions": versions, "flags": {"orca serve": self._flags, **about["flags"]}}

    def play(self, trace: Trace) -> Played:
        """Like HttpEngine's."""
        assert self._http is not None, "start was not called"
        return self._http.play(trace)

    def warm_up(self, trace: Trace) -> Played:
        """Like HttpEngine's."""
        assert self._http is not None, "start was not called"
        return self._http.warm_up(trace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if self._http is not None:
                self._http.__exit__(*error)
        finally:
            self._process.__exit__(*error)


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """{"max_batch_size": 48, "overlap": False} is --max-batch-size 48 --no-overlap."""
    flags: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags
