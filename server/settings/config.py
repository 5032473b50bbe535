"""Everything that can be set: flags, `ORCA_*` variables and `--config` keys are all made from these fields.

A field's first annotation after its type is its line in `--help`; the second, if any, is its group there.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from orca_jax.config import COMPILE_CACHE, Deadlines, Dtype, LoadFormat, OnCompile, RestartBound, WorkerLink
from orca_jax.errors import ConfigError

AccessLog = Literal["text", "json", "off"]
# Of config.Attention; the other is for tests.
ServedAttention = Literal["kernel", "cudnn", "native", "static", "follow_lengths"]

# Fields that several commands have.
DtypeFlag = Annotated[
    Dtype | None, "data type of weights, keys and values (default: float32 on a CPU, bfloat16 elsewhere)"
]
LoadFormatFlag = Annotated[LoadFormat, "dummy: random weights of a preset or directory"]
AttentionFlag = Annotated[
    ServedAttention | None,
    "how attention runs (default: a kernel on a Hopper GPU or a CPU, cuDNN on an NVIDIA GPU, else pure JAX)",
]
MaxBatchSizeFlag = Annotated[int, "requests in one iteration at most (max_bs)"]
MaxBatchTokensFlag = Annotated[
    int | None, "tokens of one iteration at most (default: 2048, or the model's positions)"
]
TensorParallelFlag = Annotated[int, "devices that each layer is split over"]
MemoryFractionFlag = Annotated[
    float | None,
    "share of each device's memory that may be taken; n_slots follows from it (default: 0.9 of a GPU's, and "
    "of a CPU's 2 GiB for keys and values)",
]
CommandBufferCollectivesFlag = Annotated[
    bool, "record a split layer's collectives into CUDA graphs too: fewer launches, but hangs were reported"
]

CompileCacheFlag = Annotated[
    str | None,
    "folder that keeps compiled programs, or 'none'; JAX_COMPILATION_CACHE_DIR changes the default "
    f"(default: {COMPILE_CACHE})",
]
OnCompileFlag = Annotated[
    OnCompile,
    "if a program turns out to be missing after ready; warn: compile it while requests wait; error: fail the "
    "engine",
]

_MAX_NAME = 256
_DEADLINES, _RESTARTS = Deadlines(), RestartBound()


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Arguments of `EngineConfig.of`, which checks them. None: it follows from model and device."""

    max_batch_size: MaxBatchSizeFlag = 32
    n_slots: Annotated[
        int | None, "tokens whose keys and values fit into memory (default: by model and memory)"
    ] = None
    max_batch_tokens: MaxBatchTokensFlag = None
    max_queue: Annotated[int, "requests that may wait; one more is refused", "limits"] = 1024
    max_queue_bytes: Annotated[int, "bytes that waiting requests may hold, approximately", "limits"] = 1 << 30
    max_queue_share: Annotated[
        float, "share of the queue that one API key may fill; without keys, one address", "limits"
    ] = 0.5
    deterministic: Annotated[bool, "outputs do not depend on what else runs, bit for bit; slower"] = False
    overlap: Annotated[bool, "prepare and issue an iteration while the previous one runs"] = True
    memory_fraction: MemoryFractionFlag = None
    dtype: DtypeFlag = None
    load_format: LoadFormatFlag = "auto"
    attention: AttentionFlag = None
    command_buffer_collectives: CommandBufferCollectivesFlag = False
    seed: Annotated[int | None, "seed for requests that have none (default: drawn)"] = None
    tensor_parallel: TensorParallelFlag = 1
    pipeline_parallel: Annotated[int, "pipeline stages, each with its own layers and devices"] = 1
    compile_cache: CompileCacheFlag = COMPILE_CACHE


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileOptions:
    """When the programs of `orca serve` are compiled; arguments of `EngineConfig.of`."""

    compile_ahead: Annotated[
        bool, "compile every program before /ready says yes; otherwise each when it is first needed"
    ] = True
    on_compile: OnCompileFlag = "warn"


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineOptions:
    """Where the stages run, and how long their workers are waited for, in seconds. See engine.py."""

    workers: Annotated[
        str | None,
        "addresses of running `orca worker`s, HOST:PORT with commas between, stage 1 first "
        "(default: the stages run in this process)",
    ] = None
    worker_processes: Annotated[
        bool, "run each stage in a process of its own on this machine, and restart it when it is lost"
    ] = False
    control_secret_file: Annotated[
        Path | None,
        "file with the secret that server and workers share; the variable ORCA_CONTROL_SECRET may hold it "
        "instead (default: none, and workers listen on loopback alone)",
        "security",
    ] = None
    iteration_timeout: Annotated[
        float, "seconds after which an iteration without a result means that a worker is lost"
    ] = _DEADLINES.iteration_seconds
    worker_timeout: Annotated[float, "seconds after which a worker whose device hangs exits"] = (
        _DEADLINES.worker_seconds
    )
    ready_timeout: Annotated[
        float, "seconds for workers to start, load and compile, at first and after a loss"
    ] = _DEADLINES.ready_seconds
    max_restarts: Annotated[
        int, "losses of workers allowed within --restart-window; after one more the server fails"
    ] = _RESTARTS.restarts
    restart_window: Annotated[float, "seconds over which --max-restarts counts"] = _RESTARTS.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFlags:
    """One stage's worker. Its sizes come from the server that it works for."""

    stage: Annotated[int, "which stage this is, from 1"]
    of: Annotated[int, "how many stages there are"]
    listen: Annotated[
        str, "HOST:PORT for control messages; another host than loopback needs a control secret"
    ]
    data_host: Annotated[
        str | None,
        "address that the next stage's worker reaches this one by, for activations (default: the host of "
        "--listen)",
    ] = None
    link: Annotated[
        WorkerLink,
        "how activations reach the next stage's process; nccl: over NVLink or InfiniBand, but the loss of "
        "one worker restarts all",
    ] = "transfer"
    coordinator: Annotated[
        str | None, "with --link nccl: a HOST:PORT of stage 1's machine where all workers meet"
    ] = None
    control_secret_file: Annotated[
        Path | None,
        "file with the secret that server and workers share; the variable ORCA_CONTROL_SECRET may hold it "
        "instead",
    ] = None
    tensor_parallel: TensorParallelFlag = 1
    memory_fraction: MemoryFractionFlag = None
    dtype: DtypeFlag = None
    load_format: LoadFormatFlag = "auto"
    attention: AttentionFlag = None
    command_buffer_collectives: CommandBufferCollectivesFlag = False
    on_compile: OnCompileFlag = "warn"
    compile_cache: CompileCacheFlag = COMPILE_CACHE
    seed: Annotated[int, "seed of the random weights"] = 0
    forward_ahead: Annotated[
        bool, "forward control messages before the device's work, not after it (off: to measure the gain)"
    ] = True


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFlags:
    """What `orca plan` is asked. Sizes are those of EngineOptions; `planning.plan.Wanted` checks them."""

    device: Annotated[
        str, "device to plan for: a100-40gb, a100-80gb, l40s, h100, h200, b200, or cpu (this machine's)"
    ]
    tensor_parallel: TensorParallelFlag = 1
    pipeline_parallel: Annotated[int, "pipeline stages"] = 1
    dtype: DtypeFlag = None
    max_batch_size: MaxBatchSizeFlag = 32
    n_slots: Annotated[int | None, "tokens whose keys and values must fit (default: as many as fit)"] = None
    max_batch_tokens: MaxBatchTokensFlag = None
    memory_fraction: MemoryFractionFlag = None
    context: Annotated[
        int | None, "tokens of a request in the cache, for the floors (default: half the model's positions)"
    ] = None
    latency_budget: Annotated[
        str | None,
        "recommend the largest max_bs that keeps the time between two tokens of a request within this, as in "
        "50ms or 0.05s; a plain number is seconds (default: none)",
    ] = None
    memory: Annotated[float | None, "GiB of each device, if not the data sheet's"] = None
    bandwidth: Annotated[float | None, "GB/s to its memory, as measured (default: the data sheet's)"] = None
    matrix_rate: Annotated[
        float | None, "TFLOP/s of its matrix products, as measured (default: the data sheet's)"
    ] = None
    compile: Annotated[
        bool, "ask XLA for the temporaries if its compiler for the device is installed; else estimate them"
    ] = True
    compile_timeout: Annotated[float, "seconds to wait for XLA before estimating"] = 600.0
    json: Annotated[bool, "print one JSON object instead of tables"] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointOptions:
    """How requests come in: addresses, names, limits, keys. Times are in seconds. Checked when made."""

    host: Annotated[str, "address to listen on; 0.0.0.0 for every interface", "addresses"] = "127.0.0.1"
    port: Annotated[int, "port for HTTP; 0 takes a free one", "addresses"] = 8000
    grpc_port: Annotated[
        int | None, "port for gRPC; 0 takes a free one, 'none' leaves gRPC out", "addresses"
    ] = 8001
    served_model_name: Annotated[
        str | None, "what clients call the model (default: its own name)", "model and engine"
    ] = None
    chat_template: Annotated[
        Path | None, "file with a Jinja chat template (default: the checkpoint's)", "model and engine"
    ] = None
    api_key_file: Annotated[
        Path | None,
        "file with API keys, one a line; the variable ORCA_API_KEYS adds more, with commas between "
        "(default: none, and requests need no key)",
        "security",
    ] = None
    ssl_certfile: Annotated[Path | None, "certificate chain (PEM), for TLS on both endpoints", "security"] = (
        None
    )
    ssl_keyfile: Annotated[Path | None, "its private key (PEM)", "security"] = None
    request_timeout: Annotated[float, "seconds from a request's arrival to its end at most", "limits"] = 600.0
    drain_timeout: Annotated[float, "seconds that running requests get to finish after SIGTERM", "limits"] = (
        30.0
    )
    max_body_bytes: Annotated[int, "bytes of one request's body at most", "limits"] = 4 << 20
    max_choices: Annotated[
        int, "completions that one request may ask for (its prompts times n)", "limits"
    ] = 128
    max_connections: Annotated[
        int, "open connections at most, of each endpoint; HTTP answers one more with 503", "limits"
    ] = 4096
    max_connections_per_address: Annotated[
        int,
        "open HTTP connections from one address at most (IPv6: from one /64); one more gets 429",
        "limits",
    ] = 1024
    max_header_bytes: Annotated[
        int, "bytes of one request's line and headers, or of a gRPC call's metadata, at most", "limits"
    ] = 32768
    header_timeout: Annotated[
        float,
        "seconds from a connection's start, or a request's first byte, to the end of its headers",
        "limits",
    ] = 10.0
    body_timeout: Annotated[
        float, "seconds from the end of a request's headers to the end of its body", "limits"
    ] = 30.0
    keep_alive_timeout: Annotated[
        float, "seconds that an HTTP connection may be idle between two requests", "limits"
    ] = 65.0
    max_watch_streams: Annotated[
        int, "gRPC streams of the health and reflection services open at once; these need no key", "limits"
    ] = 64
    access_log: Annotated[AccessLog, "a line for each request on stderr, as text or JSON", "logging"] = "text"

    def __post_init__(self) -> None:
        if not self.host.strip():
            raise ConfigError(
                "host is empty; give an address, such as 127.0.0.1, or 0.0.0.0 for every interface"
            )
        name = self.served_model_name
        if name is not None and not (name.isprintable() and 1 <= len(name) <= _MAX_NAME):
            raise ConfigError(
                f"served_model_name is {name[:_MAX_NAME]!r}; it must be 1 to {_MAX_NAME} printable characters"
            )
        for name, port in (("port", self.port), ("grpc_port", self.grpc_port)):
            if port is not None and not 0 <= port <= 65535:
                raise ConfigError(f"{name} is {port}; it must be from 0 to 65535")
        if self.grpc_port is not None and self.port == self.grpc_port != 0:
            raise ConfigError(f"port and grpc_port are both {self.port}; give each endpoint its own")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile belong together; give both or neither")
        for name, seconds in (
            ("request_timeout", self.request_timeout),
            ("drain_timeout", self.drain_timeout),
            ("header_timeout", self.header_timeout),
            ("body_timeout", self.body_timeout),
            ("keep_alive_timeout", self.keep_alive_timeout),
        ):
            if not 0 < seconds <= 1e7:
                raise ConfigError(f"{name} is {seconds:g}; it must be above 0 and at most 1e7 seconds")
        for name, number, least, most in (
            ("max_body_bytes", self.max_body_bytes, 1024, 1 << 30),
            ("max_choices", self.max_choices, 1, 1 << 16),
            ("max_connections", self.max_connections, 1, 1 << 20),
            ("max_connections_per_address", self.max_connections_per_address, 1, 1 << 20),
            ("max_header_bytes", self.max_header_bytes, 1024, 1 << 20),
            ("max_watch_streams", self.max_watch_streams, 0, 1 << 16),
        ):
            if not least <= number <= most:
                raise ConfigError(f"{name} is {number}; it must be from {least} to {most}")
        if self.access_log not in get_args(AccessLog):
            allowed = ", ".join(get_args(AccessLog))
            raise ConfigError(f"access_log is {self.access_log!r}; it must be one of {allowed}")
