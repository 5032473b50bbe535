"""Frozen configuration, checked when made, composed and never inherited."""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from orca_jax.errors import ConfigError

Dtype = Literal["float32", "bfloat16", "float16"]  # of weights, keys and values
LoadFormat = Literal["auto", "dummy"]  # dummy: random weights
# How activations cross from a worker's process to the next: independent processes, or one job.
WorkerLink = Literal["transfer", "nccl"]
# How attention runs. kernel: the Mosaic GPU kernel; native: in C, on a CPU; static, follow_lengths: pure JAX;
# interpreted: the GPU's kernel on a CPU, for tests alone.
Attention = Literal["kernel", "cudnn", "native", "static", "follow_lengths", "interpreted"]

# What becomes of a program that an engine needs after it was ready, and that was not compiled before.
OnCompile = Literal["warn", "error"]
COMPILE_CACHE = "~/.cache/orca_jax/compiled"  # where compiled programs are kept unless another folder is said


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(f"{name} is {value!r}; it must be a number of seconds above 0")


def check_whole(name: str, value: object, low: int, high: int) -> None:
    """Raises ConfigError unless `value` is a whole number from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number from {low} to {high}")


def check_memory_fraction(value: float | None) -> None:
    """The share of a device's memory that an engine may take, or None for what is usual there. Raises
    ConfigError.
    """
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"memory_fraction is {value!r}; it must be a number above 0, and at most 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingConfig:
    """How an engine serves: the parameters of Algorithm 1 and the sizes they need.

    `max_batch_size` is the paper's `max_bs` (requests in a batch); `n_slots` counts tokens whose keys and
    values fit (rounded down to whole blocks of `block_size` tokens); `max_batch_tokens` bounds the
    tokens of one iteration; `max_queue` bounds the requests that wait, and `max_queue_bytes` the memory that
    they keep; one API key or address may hold `max_queue_share` of either. `deterministic` holds one shape
    for each phase, and runs the phases in turn, so that not a bit of a request depends on what runs beside it
    (docs/generation.md). `overlap` issues an iteration while the one before it is still running; without it
    the scheduler is Algorithm 1 to the letter. With `coarse_buckets` an iteration is padded to one of fewer
    sizes (orca_jax/iteration/buckets.py). `command_buffer_collectives` lets a GPU's command buffers hold a
    split layer's collectives (docs/parallelism.md).
    """

    max_batch_size: int = 32
    n_slots: int = 16384
    max_batch_tokens: int = 2048
    block_size: int = 16
    max_queue: int = 1 << 20
    max_queue_bytes: int = 1 << 50
    max_queue_share: float = 1.0
    deterministic: bool = False
    overlap: bool = True
    coarse_buckets: bool = False
    command_buffer_collectives: bool = False

    def __post_init__(self) -> None:
        check_whole("max_batch_size", self.max_batch_size, 1, 4096)
        check_whole("block_size", self.block_size, 1, 1024)
        check_whole("n_slots", self.n_slots, self.block_size, 1 << 31)
        check_whole("max_batch_tokens", self.max_batch_tokens, 1, 1 << 20)
        check_whole("max_queue", self.max_queue, 1, 1 << 30)
        check_whole("max_queue_bytes", self.max_queue_bytes, 1 << 20, 1 << 50)
        share = self.max_queue_share
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"max_queue_share is {share!r}; it must be a number above 0, and at most 1")
        for name in ("deterministic", "overlap", "coarse_buckets", "command_buffer_collectives"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if self.max_batch_size > self.max_batch_tokens:
            raise ConfigError(
                f"max_batch_size {self.max_batch_size} is above max_batch_tokens {self.max_batch_tokens}; "
                "a batch of increments needs one token a request, so raise max_batch_tokens"
            )

    @property
    def max_queue_each(self) -> int:
        """Requests that may wait for one API key or address."""
        return max(1, int(self.max_queue_share * self.max_queue))

    @property
    def n_blocks(self) -> int:
        """Whole blocks within `n_slots`: what is reserved can always be allocated."""
        return self.n_slots // self.block_size


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartBound:
    """How often workers may be lost: `restarts` times within `seconds`; then the engine has failed."""

    restarts: int = 5
    seconds: float = 600.0

    def __post_init__(self) -> None:
        check_whole("restarts", self.restarts, 0, 1 << 20)
        _positive("seconds", self.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """How long workers in processes of their own are waited for, in seconds.

    `iteration_seconds`: the engine master waits so long for the tokens of its oldest iteration, from when it
    was sent or the one before it came back. `worker_seconds`: a worker's own patience with its device, for an
    iteration or for new caches; it exits after that. It is the longer one, so that a worker that only waits
    for a lost neighbour hears of the new epoch before. `ready_seconds`: all workers have that long to be
    ready for a new epoch, a restart and the loading of weights included. `retry_seconds`: those that are not
    are asked again so often. No wait goes longer than `look_seconds` without a look at who would interrupt.
    """

    iteration_seconds: float = 10.0
    worker_seconds: float = 30.0
    ready_seconds: float = 300.0
    retry_seconds: float = 1.0
    look_seconds: float = 0.05

    def __post_init__(self) -> None:
        for name in ("iteration_seconds", "worker_seconds", "ready_seconds", "retry_seconds", "look_seconds"):
            _positive(name, getattr(self, name))
        if self.worker_seconds < self.iteration_seconds:
            raise ConfigError(
                f"worker_seconds {self.worker_seconds:g} is below iteration_seconds "
                f"{self.iteration_seconds:g}: workers would exit before the loss of one is noticed"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """What a worker's process is told when it is started; the sizes come from the engine master later.

    `stage` counts from 0. `listen` is the control port's address, "host:port" or "unix:/path"; `data_host`
    the address that the next stage reaches its data port by. `link` is how activations cross from process
    to process: "nccl" makes all of them one jax.distributed job, whose first stage is at `coordinator`.
    `secret` guards the control port. `forward_ahead` False forwards control messages only behind the device's
    work, to measure what forwarding ahead is good for. `on_compile`, `compile_cache` and
    `command_buffer_collectives` are those of `orca_jax.LLM`; a worker always compiles ahead. `end_with_stdin`
    ends the process when its standard input does, which its parent holds open.
    """

    model: str | None = None
    stage: int
    n_stages: int
    listen: str
    data_host: str = "127.0.0.1"
    link: WorkerLink = "transfer"
    coordinator: str | None = None
    tensor_parallel: int = 1
    dtype: Dtype | None = None
    load_format: LoadFormat = "auto"
    attention: Attention | None = None
    memory_fraction: float | None = None
    seed: int = 0
    secret: str = field(default="", repr=False)
    on_compile: OnCompile = "warn"
    compile_cache: str | None = COMPILE_CACHE
    command_buffer_collectives: bool = False
    forward_ahead: bool = True
    end_with_stdin: bool = False

    def __post_init__(self) -> None:
        check_whole("the number of stages", self.n_stages, 1, 256)
        check_whole("stage", self.stage + 1, 1, self.n_stages)
        check_memory_fraction(self.memory_fraction)
        if self.link not in get_args(WorkerLink):
            raise ConfigError(f"link is {self.link!r}; it must be one of {', '.join(get_args(WorkerLink))}")
        if (self.link == "nccl") != (self.coordinator is not None):
            raise ConfigError(
                f"link is {self.link!r} and coordinator {self.coordinator!r}; nccl needs one, a HOST:PORT "
                "of the first stage's machine, and with transfer there is none"
            )
        if self.data_host in ("", "0.0.0.0", "::"):
            raise ConfigError(
                f"data_host is {self.data_host!r}; it must be one address that the next stage's worker can "
                "reach this one by"
            )
