"""The configuration of an engine. Each option is declared here, once (orca_jax/options.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from orca_jax.checks import Whole, check_fraction, check_seconds, check_whole
from orca_jax.errors import ConfigError
from orca_jax.options import Also, Hidden, In, Named, Options, Served
from orca_jax.scheduling_config import ORCA, SchedulingConfig, SchedulingOptions

Dtype = Literal["float32", "bfloat16", "float16"]  # of weights, keys and values
LoadFormat = Literal["auto", "dummy", "packed"]
# What `orca convert` writes, and the trainers' layouts among it.
Layout = Literal["tunix", "maxtext", "maxtext-scanned", "gemma"]
Format = Literal["safetensors", "orbax", Layout]
FORMATS: tuple[Format, ...] = get_args(Format)
# How attention runs. kernel: the Mosaic GPU kernel; native: in C, on a CPU; static, follow_lengths: pure JAX;
# interpreted: the GPU's kernel on a CPU, only for tests.
Attention = Literal["kernel", "cudnn", "native", "static", "follow_lengths", "interpreted"]
ExpertExchange = Literal["auto", "gather", "exchange"]
OnCompile = Literal["warn", "error"]
COMPILE_CACHE = "~/.cache/orca_jax/compiled"  # the default folder for compiled programs


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)  # only a base: quicker to make
class ServingOptions(Options):
    """The parameters of Algorithm 1 and the limits of an engine. None: from the model and the memory."""

    max_batch_size: Annotated[
        int, "maximum number of requests per iteration (max_bs)", Whole(1, 4096), Also("plan")
    ] = 32
    n_slots: Annotated[
        int | None,
        "number of tokens in the KV cache, rounded down to whole blocks (default: as many as fit)",
        Also("plan"),
    ] = None
    max_batch_tokens: Annotated[
        int | None,
        "maximum number of tokens per iteration (default: the model's positions, at least 2048, and at most "
        "8192 if prompts come in chunks)",
        Whole(1, 1 << 20),
        Also("plan"),
    ] = None
    block_size: Annotated[int, "tokens in a block of the KV cache", Whole(1, 1024), In()] = 16
    max_queue: Annotated[
        int,
        "maximum number of waiting requests; more are refused",
        "limits",
        *(Whole(1, 1 << 30), Served(1024), In("serve")),
    ] = 1 << 20
    max_queue_bytes: Annotated[
        int,
        "maximum bytes of waiting requests, estimated",
        "limits",
        *(Whole(1 << 20, 1 << 50), Served(1 << 30), In("serve")),
    ] = 1 << 50
    max_queue_share: Annotated[
        float,
        "fraction of the queue that one API key, or without keys one address, may fill",
        "limits",
        *(check_fraction, Served(0.5), In("serve")),
    ] = 1.0
    deterministic: Annotated[bool, "make outputs bit for bit independent of other requests; slower"] = False
    overlap: Annotated[
        bool,
        "prepare and issue an iteration while the previous one runs; without it the scheduler is exactly "
        "Algorithm 1",
    ] = True
    command_buffer_collectives: Annotated[
        bool,
        "record a split layer's collectives into CUDA graphs too: fewer launches, but hangs were reported",
        Also("worker"),
    ] = False


@dataclass(frozen=True, kw_only=True)
class ServingConfig(ServingOptions):
    """The sizes of an engine, none of them open.

    `coarse_buckets` pads iterations to fewer sizes, for GPUs (orca_jax/iteration/shape.py). `scheduling` is
    what the scheduler does beyond Algorithm 1.
    """

    n_slots: int = 16384
    max_batch_tokens: int = 2048
    coarse_buckets: Annotated[bool, "pad iterations to fewer sizes", In()] = False
    scheduling: SchedulingConfig = ORCA

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("n_slots", self.n_slots, self.block_size, 1 << 31)
        if self.deterministic:
            self.scheduling.check_deterministic()
        if self.max_batch_size > self.max_batch_tokens:
            raise ConfigError(
                f"max_batch_size {self.max_batch_size} is above max_batch_tokens {self.max_batch_tokens}; "
                "a decode batch has one token per request, so raise max_batch_tokens"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`, and of `recorded`."""
        scheduling = dict(values["scheduling"])
        if "order" in scheduling:
            scheduling["scheduling_policy"] = scheduling.pop("order")
        sizes: dict[str, Any] = {name: value for name, value in values.items() if name != "scheduling"}
        return cls(**sizes, scheduling=SchedulingConfig(**scheduling))

    def recorded(self) -> dict[str, Any]:
        """As `dataclasses.asdict`, with the names of recordings, where `scheduling_policy` is `order`."""
        values = asdict(self)
        scheduling: dict[str, Any] = values["scheduling"]
        values["scheduling"] = {
            "order" if name == "scheduling_policy" else name: value for name, value in scheduling.items()
        }
        return values

    @property
    def max_queue_each(self) -> int:
        """The maximum number of waiting requests of one API key or address."""
        return max(1, int(self.max_queue_share * self.max_queue))

    @property
    def n_blocks(self) -> int:
        """Whole blocks within `n_slots`, so that every reservation can be allocated."""
        return self.n_slots // self.block_size


@dataclass(frozen=True, kw_only=True)
class Sizes(SchedulingOptions, ServingOptions):
    """The sizes of an engine as the user asks for them."""

    memory_fraction: Annotated[
        float | None,
        "fraction of each device's memory to use; determines n_slots (default: 0.9 of a GPU's memory; on a "
        "CPU, 2 GiB for keys and values)",
        *(check_fraction, Also("worker", "plan")),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.filled(n_slots=self.block_size, max_batch_tokens=1 << 20)

    @property
    def scheduling(self) -> SchedulingConfig:
        """What the scheduler does beyond Algorithm 1. Raises ConfigError."""
        defaults = ORCA if self.policy == "orca" or self.deterministic else SchedulingConfig()
        asked = {each.name: getattr(self, each.name) for each in fields(SchedulingOptions)}
        return replace(defaults, **{name: value for name, value in asked.items() if value is not None})

    def filled(self, *, n_slots: int, max_batch_tokens: int, coarse_buckets: bool = False) -> ServingConfig:
        """These sizes, with the arguments in place of None. Raises ConfigError."""
        asked: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(ServingOptions)}
        sizes = {"n_slots": n_slots, "max_batch_tokens": max_batch_tokens}
        asked |= {name: value for name, value in sizes.items() if asked[name] is None}
        return ServingConfig(**asked, coarse_buckets=coarse_buckets, scheduling=self.scheduling)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Options):
    """How a model is split over devices, and which processes run its stages (ORCA 4.1, Figures 6 and 7).

    By default all stages run in this process. With `worker_processes` each runs in a process of its own on
    this machine, with `workers` in a worker that somebody started before.
    """

    tensor_parallel: Annotated[
        int, "number of devices that each layer is split over", Whole(1, 1024), Also("worker", "plan")
    ] = 1
    pipeline_parallel: Annotated[
        int, "number of pipeline stages, each with its own layers and devices", Whole(1, 1024), Also("plan")
    ] = 1
    expert_exchange: Annotated[
        ExpertExchange,
        "how a layer's devices give tokens to experts that are whole on one of them; gather: all have all "
        "tokens; auto: whichever is faster by the cost model",
        Also("worker", "plan"),
    ] = "auto"
    workers: Annotated[
        Sequence[str] | None,
        "comma-separated addresses HOST:PORT of running `orca worker`s, stage 1 first; their number is "
        "pipeline_parallel (default: the stages run in this process)",
        "workers",
        In("serve"),
    ] = None
    worker_processes: Annotated[
        bool,
        "run each stage in its own process on this machine, and restart it if it dies",
        "workers",
        In("serve", "compile"),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers is not None:
            self._take_workers(self.workers)

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


@dataclass(frozen=True, kw_only=True)
class RestartBound(Options):
    """Workers may be lost `restarts` times within `seconds`; after one more loss the engine fails."""

    restarts: Annotated[
        int,
        "lost workers tolerated within --restart-window; one more stops the server",
        "workers",
        *(Named("max_restarts"), Whole(0, 1 << 20), In("serve")),
    ] = 5
    seconds: Annotated[
        float,
        "seconds over which --max-restarts counts",
        "workers",
        *(Named("restart_window"), check_seconds, In("serve")),
    ] = 600.0


@dataclass(frozen=True, kw_only=True)
class Deadlines(Options):
    """Timeouts for workers in separate processes, in seconds.

    `worker_seconds` is the longer one, so that a worker that only waits for a lost neighbour learns of the
    new epoch before it gives up.
    """

    iteration_seconds: Annotated[
        float,
        "seconds without a result after which an iteration's worker is lost",
        "workers",
        *(Named("iteration_timeout"), check_seconds, In("serve")),
    ] = 10.0
    worker_seconds: Annotated[
        float,
        "seconds after which a worker exits if its device hangs",
        "workers",
        *(Named("worker_timeout"), check_seconds, In("serve")),
    ] = 30.0
    ready_seconds: Annotated[
        float,
        "seconds for workers to start, load and compile, initially and after a loss",
        "workers",
        *(Named("ready_timeout"), check_seconds, In("serve")),
    ] = 300.0
    retry_seconds: float = 1.0  # between attempts to reach workers that are not ready
    look_seconds: float = 0.05  # the longest wait between two checks for an interruption

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("retry_seconds", "look_seconds"):
            check_seconds(name, getattr(self, name))
        if self.worker_seconds < self.iteration_seconds:
            raise ConfigError(
                f"worker_seconds {self.worker_seconds:g} is below iteration_seconds "
                f"{self.iteration_seconds:g}: workers would exit before a lost worker is noticed; raise it"
            )


@dataclass(frozen=True, kw_only=True)
class Compiling(Options):
    """When programs are compiled, and where they are kept (docs/compiling.md)."""

    compile_ahead: Annotated[
        bool,
        "compile every program before the engine is ready; otherwise each on first use, while its request "
        "waits. Workers in processes of their own always do",
        *(Served(True), In("serve")),
    ] = False
    ready_early: Annotated[
        bool,
        "on a CPU: be ready when programs that every batch fits in are compiled; the rest, which save "
        "padding, are compiled while serving. A deterministic engine and one with an encoder wait for all",
        *(Served(True), In("serve")),
    ] = False
    on_compile: Annotated[
        OnCompile,
        "if a program is missing once the engine is ready: warn and compile it while requests wait, or fail "
        "with an error",
        In("serve", "worker"),
    ] = "warn"
    compile_cache: Annotated[
        str | Path | None,
        "folder for compiled programs, or 'none'; JAX_COMPILATION_CACHE_DIR changes the default (default: "
        f"{COMPILE_CACHE})",
        Also("worker"),
    ] = COMPILE_CACHE


@dataclass(frozen=True)
class EngineConfig(Compiling, ParallelConfig, Sizes):
    """All options of an engine: the arguments of `LLM`, and what every `orca` command that builds one takes.

    `model` may also be the nnx.Module of a model that a user wrote. Raises ConfigError for options that
    contradict each other.
    """

    model: Annotated[
        Any,
        "a directory, a name on the Hugging Face hub, package.file:function for a model of your own, or a "
        "preset's name with --load-format dummy (default: the demo model)",
    ] = None
    _: KW_ONLY
    load_format: Annotated[
        LoadFormat,
        "dummy: random weights of a preset or directory, without a tokenizer unless one is named; "
        "packed: experts in MXFP4 stay packed",
        Also("worker", "plan"),
    ] = "auto"
    dtype: Annotated[
        Dtype | None,
        "data type of weights, keys and values (default: float32 on a CPU, bfloat16 elsewhere)",
        Also("worker", "plan"),
    ] = None
    tokenizer: Annotated[
        str | Path | None,
        "a tokenizer.json, or a directory with one and perhaps a chat template, for a model without its own, "
        "or in its place (default: the model's)",
        In("serve", "generate", "chat"),
    ] = None
    generation_config: Annotated[
        str | Path,
        "where generation_config.json is read for defaults of requests and for end-of-sequence tokens; auto: "
        "the model's directory, none: nowhere, else a directory",
        In("serve", "generate", "chat"),
    ] = "auto"
    seed: Annotated[
        int | None,
        "seed of dummy weights, there 0 if not given, and of requests without their own (default: random)",
        In("serve", "worker"),
    ] = None
    attention: Annotated[
        Attention | None,
        "attention implementation (default: a kernel on a Hopper GPU or a CPU, cuDNN on another NVIDIA GPU, "
        "else pure JAX)",
        *(Hidden("interpreted"), Also("worker")),
    ] = None
    control_secret: Annotated[str, "the secret that this process and its workers share", In()] = field(
        default="", repr=False
    )
    deadlines: Deadlines = Deadlines()
    restarts: RestartBound = RestartBound()
    record: Annotated[
        Path | str | None,
        "record all requests, outputs and iterations in this file, for `orca replay`; it contains prompts "
        "(default: no recording)",
        "logging",
        In("serve"),
    ] = None
    record_bytes: Annotated[
        int,
        "maximum size of that file; the recording then stops",
        "logging",
        *(Whole(1 << 16, 1 << 50), In("serve")),
    ] = 1 << 30

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.generation_config, str | Path) or not str(self.generation_config):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"generation_config is {self.generation_config!r}; it must be 'auto', 'none' or a directory"
            )
        if self.workers is not None:
            self._refuse_worker_options()
        elif self.on_compile == "error" and self.in_this_process and not self.compile_ahead:
            raise ConfigError(
                'on_compile="error" needs compile_ahead, without which no program could be compiled; set '
                "compile_ahead, or leave on_compile out"
            )

    def _refuse_worker_options(self) -> None:
        for name, default in (
            ("attention", None),
            ("memory_fraction", None),
            ("on_compile", "warn"),
            ("command_buffer_collectives", False),
            ("expert_exchange", "auto"),
        ):
            if getattr(self, name) != default:
                raise ConfigError(f"{name} is set per worker; pass it to `orca worker`, not here")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`. Raises ConfigError, and TypeError for an unknown name."""
        parts: dict[str, Any] = {
            each.name: type(each.default) for each in fields(cls) if is_dataclass(each.default)
        }
        return cls(
            **{name: parts[name](**value) if name in parts else value for name, value in values.items()}
        )
