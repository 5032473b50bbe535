"""A worker process's options, and their JSON form on its command line."""

import json
from dataclasses import asdict, dataclass
from typing import Literal, Self

from orca_jax.checks import check_whole
from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError

# How activations reach the next worker's process. transfer: the processes are independent; nccl: one job.
WorkerLink = Literal["transfer", "nccl"]

# Where a worker may find its secret instead: everybody on a machine can read a process's arguments.
SECRET_VARIABLE = "ORCA_WORKER_SECRET"


def check_stages(n_stages: int) -> None:
    """Raise ConfigError if a pipeline may not have this many worker processes."""
    check_whole("the number of stages", n_stages, 1, 256)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """The options of one stage of `engine`; the engine master later decides the sizes.

    `stage` counts from 0. `listen` is the control port's address, "host:port" or "unix:/path". The next stage
    reaches this stage's data port at `data_host`. With the `link` "nccl" all processes form one
    jax.distributed job, which meets at `coordinator`, a "host:port" on stage 1's machine. With
    `end_with_stdin` the process ends when its standard input closes; its parent keeps it open.
    """

    stage: int
    engine: EngineConfig
    listen: str
    data_host: str = "127.0.0.1"
    link: WorkerLink = "transfer"
    coordinator: str | None = None
    end_with_stdin: bool = False

    def __post_init__(self) -> None:
        check_stages(self.n_stages)
        check_whole("stage", self.stage + 1, 1, self.n_stages)
        if self.data_host in ("", "0.0.0.0", "::"):
            raise ConfigError(
                f"data_host is {self.data_host!r}; it must be an address at which the next stage's worker "
                "can reach this one"
            )
        if (self.link == "nccl") != (self.coordinator is not None):
            raise ConfigError(
                f"link is {self.link!r} and coordinator {self.coordinator!r}; nccl needs one, a HOST:PORT on "
                "the first stage's machine, and transfer takes none"
            )

    @property
    def n_stages(self) -> int:
        return self.engine.pipeline_parallel

    def as_json(self) -> str:
        """JSON for `from_json`; it contains the secret, if there is one."""
        return json.dumps(asdict(self), default=str)  # `str` for paths

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the result of `as_json`. Raises ConfigError."""
        try:
            values = json.loads(text)
            return cls(**{**values, "engine": EngineConfig.from_dict(values["engine"])})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the worker's options are malformed: {error}") from error
