"""What a worker's process is told when it starts, and that as the text its parent starts it with."""

import json
from dataclasses import asdict, dataclass
from typing import Self

from orca_jax.config import EngineConfig, check_whole
from orca_jax.errors import ConfigError


def check_stages(n_stages: int) -> None:
    """Whether a pipeline may have so many worker processes. Raises ConfigError."""
    check_whole("the number of stages", n_stages, 1, 256)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """One stage of the engine that `engine` asks for; its sizes come from the engine master later.

    `stage` counts from 0. `listen` is the control port's address, "host:port" or "unix:/path"; `data_host`
    the address that the next stage reaches this one's data port by. Without `forward_ahead` control messages
    are passed on after the device's work rather than before it, to measure the difference. With
    `end_with_stdin` the process ends when its standard input does, which its parent holds open.
    """

    stage: int
    engine: EngineConfig
    listen: str
    data_host: str = "127.0.0.1"
    forward_ahead: bool = True
    end_with_stdin: bool = False

    def __post_init__(self) -> None:
        check_stages(self.n_stages)
        check_whole("stage", self.stage + 1, 1, self.n_stages)
        if self.data_host in ("", "0.0.0.0", "::"):
            raise ConfigError(
                f"data_host is {self.data_host!r}; it must be one address that the next stage's worker can "
                "reach this one by"
            )

    @property
    def n_stages(self) -> int:
        """Of the whole pipeline."""
        return self.engine.parallel.pipeline_parallel

    def as_json(self) -> str:
        """For `from_json`; with the secret."""
        return json.dumps(asdict(self), default=str)  # str: of a path

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `as_json` gave. Raises ConfigError."""
        try:
            values = json.loads(text)
            return cls(**{**values, "engine": EngineConfig.from_dict(values["engine"])})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the worker's options cannot be read: {error}") from error
