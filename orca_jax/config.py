"""Frozen configuration dataclasses, checked on construction, combined by composition."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

from orca_jax.checks import check_choice, check_flag, check_fraction, check_seconds, check_whole
from orca_jax.errors import ConfigError
from orca_jax.scheduling_config import ORCA, PolicyName, QueueOrder, Reservation, SchedulingConfig

Dtype = Literal["float32", "bfloat16", "float16"]  # of weights, keys and values
LoadFormat = Literal["auto", "dummy", "packed"]  # dummy: random weights; packed: experts stay in MXFP4
# How activations reach the next worker's process. transfer: the processes are independent; nccl: one job.
WorkerLink = Literal["transfer", "nccl"]
# How attention runs. kernel: the Mosaic GPU kernel; native: in C, on a CPU; static, follow_lengths: pure JAX;
# interpreted: the GPU's kernel on a CPU, only for tests.
Attention = Literal["kernel", "cudnn", "native", "static", "follow_lengths", "interpreted"]

# How experts that are whole on their devices get tokens. gather: all devices have all; auto: whichever the
# cost model says is faster (orca_jax/planning/expert_exchange.py).
ExpertExchange = Literal["auto", "gather", "exchange"]

# If an engine needs a program that was not compiled before it was ready: compile it and warn, or fail.
OnCompile = Literal["warn", "error"]
RECORD_BYTES = 1 << 30  # the default limit of a recording
COMPILE_CACHE = "~/.cache/orca_jax/compiled"  # the default folder for compiled programs


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingConfig:
    """The parameters of Algorithm 1 and the limits of an engine.

    `max_batch_size` is the paper's `max_bs`, the maximum number of requests per batch. `n_slots` is the
    number of tokens whose keys and values fit, rounded down to whole blocks of `block_size` tokens.
    `max_batch_tokens` is the maximum number of tokens per iteration.

    `max_queue` limits the number of waiting requests, and `max_queue_bytes` their memory; one API key or
    address may hold the fraction `max_queue_share` of each.

    `deterministic` uses one shape per phase and never mixes the phases in an iteration, so that an output is
    bit for bit independent of other requests (docs/generation.md). `overlap` issues an iteration while the
    previous one runs; without it the scheduler is exactly Algorithm 1. `coarse_buckets` pads iterations to
    fewer sizes (orca_jax/iteration/shape.py). `command_buffer_collectives` records a split layer's
    collectives into a GPU's command buffers (docs/parallelism.md). `scheduling` is what the scheduler does
    beyond Algorithm 1.
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
    scheduling: SchedulingConfig = ORCA

    def __post_init__(self) -> None:
        check_whole("max_batch_size", self.max_batch_size, 1, 4096)
        check_whole("block_size", self.block_size, 1, 1024)
        check_whole("n_slots", self.n_slots, self.block_size, 1 << 31)
        check_whole("max_batch_tokens", self.max_batch_tokens, 1, 1 << 20)
        check_whole("max_queue", self.max_queue, 1, 1 << 30)
        check_whole("max_queue_bytes", self.max_queue_bytes, 1 << 20, 1 << 50)
        check_fraction("max_queue_share", self.max_queue_share)
        for name in ("deterministic", "overlap", "coarse_buckets", "command_buffer_collectives"):
            check_flag(name, getattr(self, name))
        if self.deterministic:
            self.scheduling.check_deterministic()
        if self.max_batch_size > self.max_batch_tokens:
            raise ConfigError(
                f"max_batch_size {self.max_batch_size} is above max_batch_tokens {self.max_batch_tokens}; "
                "a decode batch has one token per request, so raise max_batch_tokens"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`."""
        arguments = dict(values)
        arguments["scheduling"] = SchedulingConfig(**values["scheduling"])
        return cls(**arguments)

    @property
    def max_queue_each(self) -> int:
        """The maximum number of waiting requests of one API key or address."""
        return max(1, int(self.max_queue_share * self.max_queue))

    @property
    def n_blocks(self) -> int:
        """Whole blocks within `n_slots`, so that every reservation can be allocated."""
        return self.n_slots // self.block_size


_DERIVED = ("coarse_buckets", "scheduling")  # fields of ServingConfig that Sizes has in another form


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The ServingConfig as the user specifies it. None: derived from the model and the memory.

    `memory_fraction` is the fraction of each device's memory that the engine may use; it sets `n_slots`. The
    fields from `policy` on are those of SchedulingConfig; None is on, except where `policy` or
    `deterministic` excludes it.
    """

    max_batch_size: int = 32
    n_slots: int | None = None
    max_batch_tokens: int | None = None
    block_size: int = 16
    max_queue: int = 1 << 20
    max_queue_bytes: int = 1 << 50
    max_queue_share: float = 1.0
    deterministic: bool = False
    overlap: bool = True
    command_buffer_collectives: bool = False
    memory_fraction: float | None = None
    policy: PolicyName = "default"
    chunked_prefill: bool | None = None
    prefill_tokens: int | None = None
    prefix_caching: bool | None = None
    reservation: Reservation | None = None
    scheduling_policy: QueueOrder = "fcfs"

    def __post_init__(self) -> None:
        if self.memory_fraction is not None:
            check_fraction("memory_fraction", self.memory_fraction)
        self.filled(n_slots=self.block_size, max_batch_tokens=1 << 20)

    @property
    def scheduling(self) -> SchedulingConfig:
        """What the scheduler does beyond Algorithm 1. Raises ConfigError."""
        extended = self.policy != "orca" and not self.deterministic
        reservation = "on-demand" if extended else "full"
        return SchedulingConfig(
            policy=self.policy,
            chunked_prefill=extended if self.chunked_prefill is None else self.chunked_prefill,
            prefill_tokens=self.prefill_tokens,
            prefix_caching=extended if self.prefix_caching is None else self.prefix_caching,
            reservation=reservation if self.reservation is None else self.reservation,
            order=self.scheduling_policy,
        )

    def filled(self, *, n_slots: int, max_batch_tokens: int, coarse_buckets: bool = False) -> ServingConfig:
        """These sizes, with the arguments in place of None. Raises ConfigError."""
        names = [field.name for field in fields(ServingConfig) if field.name not in _DERIVED]
        asked: dict[str, Any] = {name: getattr(self, name) for name in names}
        chosen = {name: value for name, value in asked.items() if value is not None}
        defaults: dict[str, Any] = {"n_slots": n_slots, "max_batch_tokens": max_batch_tokens}
        derived: dict[str, Any] = {"coarse_buckets": coarse_buckets, "scheduling": self.scheduling}
        return ServingConfig(**{**asked, **defaults, **chosen, **derived})


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How a model is split over devices, and which processes run its stages (ORCA 4.1, Figures 6 and 7).

    The model is split into `pipeline_parallel` stages of whole layers, and each layer over `tensor_parallel`
    devices. By default all stages run in this process. With `worker_processes` each runs in its own process
    on this machine. With `workers` each runs in a worker that somebody started before: these are the workers'
    control ports, "host:port", stage 1 first, and their number is `pipeline_parallel`.

    `link` is how activations reach the next process. With "nccl" all processes form one jax.distributed job,
    which meets at `coordinator`, a "host:port" on stage 1's machine.

    `expert_exchange` is how the devices of a stage give tokens to experts that are whole on one of them.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    worker_processes: bool = False
    workers: Sequence[str] | None = None
    link: WorkerLink = "transfer"
    coordinator: str | None = None
    expert_exchange: ExpertExchange = "auto"

    def __post_init__(self) -> None:
        check_whole("pipeline_parallel", self.pipeline_parallel, 1, 1024)
        check_whole("tensor_parallel", self.tensor_parallel, 1, 1024)
        if self.workers is not None:
            self._take_workers(self.workers)
        check_choice("link", self.link, get_args(WorkerLink))
        check_choice("expert_exchange", self.expert_exchange, get_args(ExpertExchange))
        if (self.link == "nccl") != (self.coordinator is not None):
            raise ConfigError(
                f"link is {self.link!r} and coordinator {self.coordinator!r}; nccl needs one, a HOST:PORT on "
                "the first stage's machine, and transfer takes none"
            )

    def _take_workers(self, workers: Sequence[str]) -> None:
        if isinstance(workers, str) or not workers:
            raise ConfigError(f"workers is {workers!r}; it must be a list of addresses, one for each stage")
        if self.worker_processes:
            raise ConfigError(
                "workers and worker_processes exclude each other: give addresses of running workers, or have "
                "them started here"
            )
        if self.pipeline_parallel not in (1, len(workers)):
            raise ConfigError(
                f"pipeline_parallel is {self.pipeline_parallel}, but there are {len(workers)} workers; each "
                "is one stage, so leave pipeline_parallel out"
            )
        object.__setattr__(self, "workers", tuple(workers))
        object.__setattr__(self, "pipeline_parallel", len(workers))

    @property
    def n_devices(self) -> int:
        """The number of devices of all stages."""
        return self.pipeline_parallel * self.tensor_parallel

    @property
    def in_this_process(self) -> bool:
        """Whether all stages run in this process."""
        return self.workers is None and not self.worker_processes


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartBound:
    """Workers may be lost `restarts` times within `seconds`; after one more loss the engine fails."""

    restarts: int = 5
    seconds: float = 600.0

    def __post_init__(self) -> None:
        check_whole("restarts", self.restarts, 0, 1 << 20)
        check_seconds("seconds", self.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """Timeouts for workers in separate processes, in seconds.

    `iteration_seconds`: for the tokens of the oldest iteration, since it was sent or its predecessor
    returned. After that the engine master counts a worker as lost. `worker_seconds`: for a worker's device to
    complete an iteration or allocate new caches. After that the worker exits. This is the longer one, so that
    a worker that only waits for a lost neighbour learns of the new epoch first. `ready_seconds`: for all
    workers to be ready for a new epoch, including a restart and the loading of weights. `retry_seconds`: the
    interval between attempts to reach workers that are not ready. `look_seconds`: the longest wait between
    two checks for an interruption.
    """

    iteration_seconds: float = 10.0
    worker_seconds: float = 30.0
    ready_seconds: float = 300.0
    retry_seconds: float = 1.0
    look_seconds: float = 0.05

    def __post_init__(self) -> None:
        for name in ("iteration_seconds", "worker_seconds", "ready_seconds", "retry_seconds", "look_seconds"):
            check_seconds(name, getattr(self, name))
        if self.worker_seconds < self.iteration_seconds:
            raise ConfigError(
                f"worker_seconds {self.worker_seconds:g} is below iteration_seconds "
                f"{self.iteration_seconds:g}: workers would exit before a lost worker is noticed; raise it"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiling:
    """When programs are compiled, and where they are kept.

    `compile_ahead` compiles all of them before the engine is ready; `on_compile` handles a program that is
    missing afterwards. `compile_cache` is a folder, or None to keep nothing. With `ready_early` an engine on
    a CPU is ready when the programs of a few buckets are compiled; those of the others follow while it serves
    larger ones in their place. A deterministic engine and one with an encoder wait for all.
    """

    compile_ahead: bool = False
    ready_early: bool = False
    on_compile: OnCompile = "warn"
    compile_cache: str | Path | None = COMPILE_CACHE

    def __post_init__(self) -> None:
        check_choice("on_compile", self.on_compile, get_args(OnCompile))


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The complete configuration of an engine, for `LLM`, every `orca` command and each worker's process.

    `LLM` documents the fields. `model` is a str, a Path, None, or the module of a model that a user wrote.
    """

    model: Any = None
    load_format: LoadFormat = "auto"
    generation_config: str = "auto"
    tokenizer: str | None = None
    dtype: Dtype | None = None
    seed: int | None = None
    attention: Attention | None = None
    sizes: Sizes = Sizes()
    parallel: ParallelConfig = ParallelConfig()
    compiling: Compiling = Compiling()
    deadlines: Deadlines = Deadlines()
    restarts: RestartBound = RestartBound()
    control_secret: str = field(default="", repr=False)
    record: str | Path | None = None
    record_bytes: int = RECORD_BYTES

    def __post_init__(self) -> None:
        check_whole("record_bytes", self.record_bytes, 1 << 16, 1 << 50)
        check_choice("load_format", self.load_format, get_args(LoadFormat))
        if not isinstance(self.generation_config, str) or not self.generation_config:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"generation_config is {self.generation_config!r}; it must be 'auto', 'none' or a directory"
            )
        if self.dtype is not None:
            check_choice("dtype", self.dtype, get_args(Dtype))
        if self.attention is not None:
            check_choice("attention", self.attention, get_args(Attention))
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"seed is {self.seed!r}; it must be a whole number or None")
        compiling = self.compiling
        if self.parallel.workers is not None:
            self._refuse_worker_options()
        elif (
            compiling.on_compile == "error" and self.parallel.in_this_process and not compiling.compile_ahead
        ):
            raise ConfigError(
                'on_compile="error" needs compile_ahead, without which no program could be compiled; set '
                "compile_ahead, or leave on_compile out"
            )

    def _refuse_worker_options(self) -> None:
        for name, is_given in (
            ("attention", self.attention is not None),
            ("memory_fraction", self.sizes.memory_fraction is not None),
            ("on_compile", self.compiling.on_compile == "error"),
            ("command_buffer_collectives", self.sizes.command_buffer_collectives),
            ("expert_exchange", self.parallel.expert_exchange != "auto"),
        ):
            if is_given:
                raise ConfigError(f"{name} is set per worker; pass it to `orca worker`, not here")

    @classmethod
    def of(cls, **arguments: Any) -> Self:
        """From the keyword arguments of `LLM`: the fields of Sizes, ParallelConfig and Compiling by name.

        Raises ConfigError, and TypeError for an unknown name.
        """
        parts: dict[str, Any] = {}
        for name, part in (("sizes", Sizes), ("parallel", ParallelConfig), ("compiling", Compiling)):
            names = [field.name for field in fields(part) if field.name in arguments]
            parts[name] = part(**{name: arguments.pop(name) for name in names})
        return cls(**parts, **arguments)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`. Raises ConfigError, and TypeError for an unknown name."""
        parts: dict[str, Any] = {
            field.name: type(field.default) for field in fields(cls) if is_dataclass(field.default)
        }
        return cls(
            **{name: parts[name](**value) if name in parts else value for name, value in values.items()}
        )
