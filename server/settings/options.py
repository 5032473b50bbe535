"""Every option of the `orca` commands, as fields of dataclasses.

Flags, `ORCA_*` variables and `--config` keys are made from these fields. After its type, a field's annotation
holds its line in `--help`, then its group there if it differs from the command's, then its bounds.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from orca_jax.config import (
    COMPILE_CACHE,
    RECORD_BYTES,
    Deadlines,
    Dtype,
    ExpertExchange,
    LoadFormat,
    OnCompile,
    RestartBound,
    WorkerLink,
)
from orca_jax.scheduling_config import PolicyName, QueueOrder, Reservation

# The values of config.Attention that users may choose; "interpreted" is for tests.
ServedAttention = Literal["kernel", "cudnn", "native", "static", "follow_lengths"]

# Fields shared by several commands.
DtypeFlag = Annotated[
    Dtype | None, "data type of weights, keys and values (default: float32 on a CPU, bfloat16 elsewhere)"
]
LoadFormatFlag = Annotated[
    LoadFormat, "dummy: random weights of a preset or directory; packed: experts in MXFP4 stay packed"
]
AttentionFlag = Annotated[
    ServedAttention | None,
    "attention implementation (default: a kernel on a Hopper GPU or a CPU, cuDNN on another NVIDIA GPU, "
    "else pure JAX)",
]
MaxBatchSizeFlag = Annotated[int, "maximum number of requests per iteration (max_bs)"]
MaxBatchTokensFlag = Annotated[
    int | None,
    "maximum number of tokens per iteration (default: the model's positions, at least 2048, and at most 8192 "
    "if prompts come in chunks)",
]
TensorParallelFlag = Annotated[int, "number of devices that each layer is split over"]
MemoryFractionFlag = Annotated[
    float | None,
    "fraction of each device's memory to use; determines n_slots (default: 0.9 of a GPU's memory; on a CPU, "
    "2 GiB for keys and values)",
]
CommandBufferCollectivesFlag = Annotated[
    bool, "record a split layer's collectives into CUDA graphs too: fewer launches, but hangs were reported"
]
ExpertExchangeFlag = Annotated[
    ExpertExchange,
    "how a layer's devices give tokens to experts that are whole on one of them; gather: all have all "
    "tokens; auto: whichever is faster by the cost model",
]

CompileCacheFlag = Annotated[
    str | None,
    "folder for compiled programs, or 'none'; JAX_COMPILATION_CACHE_DIR changes the default "
    f"(default: {COMPILE_CACHE})",
]
OnCompileFlag = Annotated[
    OnCompile,
    "if a program is missing once the engine is ready: warn and compile it while requests wait, or fail with "
    "an error",
]

_DEADLINES, _RESTARTS = Deadlines(), RestartBound()


class Bounds(NamedTuple):
    """The smallest and largest value of a whole number."""

    low: int
    high: int


PORT = Bounds(0, 65535)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Arguments of `EngineConfig.of`, which checks them. None: derived from the model and the device."""

    max_batch_size: MaxBatchSizeFlag = 32
    n_slots: Annotated[int | None, "number of tokens in the KV cache (default: as many as fit)"] = None
    max_batch_tokens: MaxBatchTokensFlag = None
    max_queue: Annotated[int, "maximum number of waiting requests; more are refused", "limits"] = 1024
    max_queue_bytes: Annotated[int, "maximum bytes of waiting requests, estimated", "limits"] = 1 << 30
    max_queue_share: Annotated[
        float, "fraction of the queue that one API key, or without keys one address, may fill", "limits"
    ] = 0.5
    deterministic: Annotated[bool, "make outputs bit for bit independent of other requests; slower"] = False
    overlap: Annotated[bool, "prepare and issue an iteration while the previous one runs"] = True
    memory_fraction: MemoryFractionFlag = None
    dtype: DtypeFlag = None
    load_format: LoadFormatFlag = "auto"
    generation_config: Annotated[
        str,
        "where generation_config.json is read for defaults of requests; auto: the model's directory, none: "
        "nowhere, else a directory",
    ] = "auto"
    tokenizer: Annotated[
        str | None,
        "a tokenizer.json, or a directory with one and perhaps a chat template, for a model without its own "
        "(default: the model's)",
    ] = None
    policy: Annotated[
        PolicyName,
        "orca: Algorithm 1 of the paper and nothing else; it excludes the flags below",
    ] = "default"
    chunked_prefill: Annotated[
        bool | None,
        "split long prompts over iterations, so that they do not delay others (default: on)",
    ] = None
    prefill_tokens: Annotated[
        int | None,
        "maximum number of prompt tokens in an iteration that delays others (default: from the device)",
    ] = None
    prefix_caching: Annotated[
        bool | None, "reuse the keys and values of prompts that begin alike (default: on)"
    ] = None
    reservation: Annotated[
        Reservation | None,
        "full: keep room in the KV cache for the longest possible output; on-demand: block by block, and "
        "preempt the latest request if none is left (default: on-demand)",
    ] = None
    scheduling_policy: Annotated[
        QueueOrder,
        "order of waiting requests: by arrival, by `priority` (lower first), equal shares of the tokens for "
        "each API key, or among the first 16 the longest cached beginning first",
    ] = "fcfs"
    attention: AttentionFlag = None
    command_buffer_collectives: CommandBufferCollectivesFlag = False
    expert_exchange: ExpertExchangeFlag = "auto"
    seed: Annotated[int | None, "seed for requests without their own (default: random)"] = None
    tensor_parallel: TensorParallelFlag = 1
    pipeline_parallel: Annotated[int, "number of pipeline stages, each with its own layers and devices"] = 1
    compile_cache: CompileCacheFlag = COMPILE_CACHE
    record: Annotated[
        Path | None,
        "record all requests, outputs and iterations in this file, for `orca replay`; it contains prompts "
        "(default: no recording)",
        "logging",
    ] = None
    record_bytes: Annotated[int, "maximum size of that file; the recording then stops", "logging"] = (
        RECORD_BYTES
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileOptions:
    """When `orca serve` compiles its programs. Arguments of `EngineConfig.of`."""

    compile_ahead: Annotated[
        bool, "compile every program before /ready succeeds; otherwise each on first use"
    ] = True
    ready_early: Annotated[
        bool,
        "on a CPU: let /ready succeed when programs that every batch fits in are compiled; the rest, which "
        "save padding, are compiled while serving",
    ] = True
    on_compile: OnCompileFlag = "warn"


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineOptions:
    """Where engines and their pipeline stages run, and the timeouts of workers. See engine.py."""

    workers: Annotated[
        str | None,
        "comma-separated addresses HOST:PORT of running `orca worker`s, stage 1 first "
        "(default: the stages run in this process)",
    ] = None
    worker_processes: Annotated[
        bool, "run each stage in its own process on this machine, and restart it if it dies"
    ] = False
    control_secret_file: Annotated[
        Path | None,
        "file with the secret shared by server and workers; or set ORCA_CONTROL_SECRET (default: none, and "
        "workers listen only on loopback)",
        "security",
    ] = None
    iteration_timeout: Annotated[
        float, "seconds without a result after which an iteration's worker is lost"
    ] = _DEADLINES.iteration_seconds
    worker_timeout: Annotated[float, "seconds after which a worker exits if its device hangs"] = (
        _DEADLINES.worker_seconds
    )
    ready_timeout: Annotated[
        float, "seconds for workers to start, load and compile, initially and after a loss"
    ] = _DEADLINES.ready_seconds
    max_restarts: Annotated[
        int, "lost workers tolerated within --restart-window; one more stops the server"
    ] = _RESTARTS.restarts
    restart_window: Annotated[float, "seconds over which --max-restarts counts"] = _RESTARTS.seconds
    replicas: Annotated[
        int | None,
        "number of engines behind one address, each in a process of Ray's, which must be installed (default: "
        "one, in this process)",
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFlags:
    """The worker of one stage. The server sends it the batch sizes."""

    stage: Annotated[int, "number of this stage, from 1"]
    of: Annotated[int, "number of stages"]
    listen: Annotated[str, "HOST:PORT for control messages; a host other than loopback needs a secret"]
    data_host: Annotated[
        str | None,
        "address at which the next stage's worker reaches this one for activations (default: the host of "
        "--listen)",
    ] = None
    link: Annotated[
        WorkerLink,
        "how activations reach the next stage's process; nccl: over NVLink or InfiniBand, but losing one "
        "worker restarts all",
    ] = "transfer"
    coordinator: Annotated[
        str | None, "with --link nccl: a HOST:PORT on stage 1's machine where all workers meet"
    ] = None
    control_secret_file: Annotated[
        Path | None, "file with the secret shared by server and workers; or set ORCA_CONTROL_SECRET"
    ] = None
    tensor_parallel: TensorParallelFlag = 1
    memory_fraction: MemoryFractionFlag = None
    dtype: DtypeFlag = None
    load_format: LoadFormatFlag = "auto"
    attention: AttentionFlag = None
    command_buffer_collectives: CommandBufferCollectivesFlag = False
    expert_exchange: ExpertExchangeFlag = "auto"
    on_compile: OnCompileFlag = "warn"
    compile_cache: CompileCacheFlag = COMPILE_CACHE
    seed: Annotated[int, "seed of random weights"] = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFlags:
    """The arguments of `orca plan`. `planning.plan.PlanTarget` checks the sizes, as in EngineOptions."""

    device: Annotated[
        str, "device to plan for: a100-40gb, a100-80gb, l40s, h100, h200, b200, or cpu (this machine's)"
    ]
    tensor_parallel: TensorParallelFlag = 1
    pipeline_parallel: Annotated[int, "number of pipeline stages"] = 1
    expert_exchange: ExpertExchangeFlag = "auto"
    dtype: DtypeFlag = None
    load_format: LoadFormatFlag = "auto"
    max_batch_size: MaxBatchSizeFlag = 32
    n_slots: Annotated[int | None, "number of tokens in the KV cache (default: as many as fit)"] = None
    max_batch_tokens: MaxBatchTokensFlag = None
    memory_fraction: MemoryFractionFlag = None
    context: Annotated[
        int | None, "cached tokens per request, for the floors (default: half the model's positions)"
    ] = None
    latency_budget: Annotated[
        str | None,
        "recommend the largest max_bs that keeps the time between two tokens of a request within this, for "
        "example 50ms or 0.05s; a plain number means seconds (default: none)",
    ] = None
    memory: Annotated[float | None, "memory of each device in GiB (default: the data sheet's)"] = None
    bandwidth: Annotated[float | None, "measured memory bandwidth in GB/s (default: the data sheet's)"] = None
    matrix_rate: Annotated[
        float | None, "measured rate of matrix products in TFLOP/s (default: the data sheet's)"
    ] = None
    compile: Annotated[
        bool, "compile with XLA, if its compiler for the device is installed, to size temporaries exactly"
    ] = True
    compile_timeout: Annotated[float, "seconds to wait for XLA before estimating"] = 600.0
    json: Annotated[bool, "print one JSON object instead of tables"] = False
