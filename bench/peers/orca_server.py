"""`orca serve` over HTTP, in a separate process that the benchmark starts and ends."""

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import orca_jax
from bench.peers.http_engine import PLAY_SECONDS, ServedEngine
from bench.server.server_process import ServerProcess

START_SECONDS = 900.0


class OrcaServer(ServedEngine):
    """A server for a checkpoint on a free loopback port; a context manager that ends it.

    `settings` are flags of `orca serve` by their names with underscores, as in {"max_batch_size": 48}.
    """

    def __init__(
        self, name: str, checkpoint: str, settings: Mapping[str, Any], *, play_seconds: float = PLAY_SECONDS
    ) -> None:
        self._flags = as_flags(settings)
        self._server = ServerProcess([checkpoint, *self._flags], compile_ahead=True)
        super().__init__(name, self._server, play_seconds)

    def start(self) -> None:
        """Wait until it is ready and set `about`. Raises ServerFailed and AddressFailed."""
        self._server.wait_until_ready(START_SECONDS)
        about = self.meet(self._server.url)
        versions = (
            f"orca_jax {orca_jax.__version__}, jax {version('jax')}, Python {platform.python_version()}"
        )
        self.about = {**about, "versions": versions, "flags": {"orca serve": self._flags, **about["flags"]}}


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
