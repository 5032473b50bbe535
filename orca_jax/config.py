"""The configuration of an engine. Each option is declared here, once (orca_jax/options.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from orca_jax.checks import (
    NEXT_TOKEN_HEAD,
    EachOf,
    Whole,
    check_drafter,
    check_fraction,
    check_host_and_port,
    check_names,
    check_place,
    check_rate,
    check_seconds,
    check_timeout,
    check_whole,
    drafting_head,
    drafting_model,
)
from orca_jax.errors import ConfigError
from orca_jax.options import Also, Hidden, In, Named, Options, Or, Served

Dtype = Literal["float32", "bfloat16", "float16"]  # of weights, keys and values
LoadFormat = Literal["auto", "dummy", "packed"]
Rounding = Literal["int8", "int4", "fp8"]  # the numbers to which --quantization rounds
# last, cls: the hidden state of the last or the first token. mean: the mean over all tokens.
Pooling = Literal["last", "mean", "cls"]
KVCacheDtype = Literal["auto", "int8", "fp8"]  # of cached keys and values; auto: the model's dtype
# What `orca convert` writes, and the trainers' layouts among it.
Layout = Literal["tunix", "maxtext", "maxtext-scanned", "gemma", "levanter", "easydel"]
Format = Literal["safetensors", "orbax", Layout]
FORMATS: tuple[Format, ...] = get_args(Format)
# What LoRA adapters may change beside linear layers, where there is room for it.
LoraExtra = Literal["embedding", "head", "experts"]
LORA_EXTRAS: tuple[LoraExtra, ...] = get_args(LoraExtra)
# How attention runs. kernel: the Mosaic GPU kernel; native: in C, on a CPU; static, follow_lengths: pure JAX;
# interpreted: the GPU's kernel on a CPU, only for tests.
Attention = Literal["kernel", "cudnn", "native", "static", "follow_lengths", "interpreted"]
ExpertExchange = Literal["auto", "gather", "exchange"]
OnCompile = Literal["warn", "error"]
MAX_LORAS = 16  # the default's bound
MAX_LORA_RANK = 16  # vLLM's default too
COMPILE_CACHE = "~/.cache/orca_jax/compiled"  # the default folder for compiled programs
# default: with the extensions that the other fields turn on. Others are the names of users' classes.
PolicyName = Literal["default", "orca"]
# full: slots for the longest possible output, as in Algorithm 1. on-demand: block by block.
Reservation = Literal["full", "on-demand"]
# How waiting requests are ordered.
QueueOrder = Literal["fcfs", "priority", "fair", "longest-prefix"]
# Who drafts tokens that an iteration verifies. Others are the names of users' classes.
DrafterName = Literal["off", "ngram", "suffix", "mtp"]
# What a server does for others (docs/separation.md).
Role = Literal["prefill", "decode", "both"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)  # only a base: quicker to make
class SchedulingOptions(Options):
    """The scheduler's options (docs/scheduling.md). None: on, except where another option excludes it."""

    policy: Annotated[
        PolicyName | str,
        "which requests run next; orca: Algorithm 1 of the paper and nothing else, which excludes the other "
        "scheduling flags; package.file:Class: a policy of your own (docs/scheduling.md)",
        *(Or("package.file:Class"), check_place),
    ] = "default"
    chunked_prefill: Annotated[
        bool | None,
        "split long prompts over iterations, so that they do not delay others (default: on)",
    ] = None
    prefill_tokens: Annotated[
        int | None,
        "maximum number of prompt tokens in an iteration with decodes (default: from the device)",
        Whole(1, 1 << 20),
    ] = None
    prefix_caching: Annotated[
        bool | None, "reuse the keys and values of equal prompt beginnings (default: on)"
    ] = None
    snapshot_blocks: Annotated[
        int,
        "hybrid models: number of blocks of a prompt after which the prefix cache keeps another copy of its "
        "recurrent states",
        Whole(1, 1 << 20),
    ] = 64
    reservation: Annotated[
        Reservation | None,
        "full: keep room in the KV cache for the longest possible output; on-demand: block by block, and "
        "preempt the latest request if none is left (default: on-demand)",
    ] = None
    scheduling_policy: Annotated[
        QueueOrder,
        "order of waiting requests; fcfs: by arrival; priority: by `priority`, lower first; fair: equal "
        "shares of tokens for each API key; longest-prefix: among the first 16, the longest cached prefix "
        "first",
    ] = "fcfs"
    speculative: Annotated[
        DrafterName | str,
        "speculative decoding, which changes no token; ngram: drafts from the prompt and the output so far; "
        "suffix: from earlier outputs too; draft:MODEL: by a smaller model with the same tokenizer; "
        "mtp: by the checkpoint's layer that predicts further tokens; eagle3:DIRECTORY: by an EAGLE-3 head; "
        "package.file:Class: a drafter of your own (docs/speculation.md)",
        *(Or("draft:MODEL, eagle3:DIRECTORY, package.file:Class"), check_drafter, Also("plan")),
    ] = "off"
    speculative_tokens: Annotated[
        int, "maximum number of draft tokens of a request in an iteration", Whole(1, 64)
    ] = 4

    @property
    def speculates(self) -> bool:
        """Whether outputs are drafted."""
        return self.speculative != "off"

    @property
    def draft_head(self) -> bool:
        """Whether a head drafts, from the served model's hidden states."""
        return self.speculative == NEXT_TOKEN_HEAD or self.eagle3_head is not None

    @property
    def drafts_on_device(self) -> bool:
        """Whether a model or a head with weights of its own drafts, for all requests together."""
        return self.draft_head or self.draft_model is not None

    @property
    def eagle3_head(self) -> str | None:
        """The directory of the EAGLE-3 head that drafts; None if none does."""
        return drafting_head(self.speculative)

    @property
    def draft_model(self) -> str | None:
        """The name of the model that drafts; None if none does."""
        return drafting_model(self.speculative)


@dataclass(frozen=True, kw_only=True)
class SchedulingConfig(SchedulingOptions):
    """The scheduler's resolved options.

    With the scheduling policy "priority", one level of priority counts as much as `aging_seconds` of waiting.
    """

    chunked_prefill: bool = True
    prefix_caching: bool = True
    reservation: Reservation = "on-demand"
    aging_seconds: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seconds("aging_seconds", self.aging_seconds)
        if self.policy == "orca":
            self._refuse("policy 'orca' is Algorithm 1 and nothing else", order=True)
        if self.scheduling_policy == "longest-prefix" and not self.prefix_caching:
            message = "scheduling_policy 'longest-prefix' orders requests by the prefix cache"
            raise ConfigError(f"{message}; leave it out, or prefix_caching=False")

    @property
    def on_demand(self) -> bool:
        """Whether requests grow block by block."""
        return self.reservation == "on-demand"

    def check_deterministic(self) -> None:
        """Raises ConfigError for what makes an output's bits depend on other requests."""
        self._refuse("deterministic computes each prompt whole and once", order=False)

    def _refuse(self, why: str, *, order: bool) -> None:
        asked = {
            "chunked_prefill": self.chunked_prefill,
            "prefill_tokens": self.prefill_tokens is not None,
            "prefix_caching": self.prefix_caching,
            "reservation 'on-demand'": self.on_demand,
            f"scheduling_policy {self.scheduling_policy!r}": order and self.scheduling_policy != "fcfs",
            f"speculative {self.speculative!r}": order and self.speculates,
        }
        refused = [name for name, is_asked in asked.items() if is_asked]
        if refused:
            raise ConfigError(f"{why}, so it excludes {', '.join(refused)}; leave one of the two out")


# Algorithm 1 and nothing else.
ORCA = SchedulingConfig(policy="orca", chunked_prefill=False, prefix_caching=False, reservation="full")


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
        "8192 with chunked prefill)",
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
        "maximum memory of waiting requests in bytes, estimated",
        "limits",
        *(Whole(1 << 20, 1 << 50), Served(1 << 30), In("serve")),
    ] = 1 << 50
    max_queue_share: Annotated[
        float,
        "fraction of the queue that one API key, or without keys one address, may fill",
        "limits",
        *(check_fraction, Served(0.5), In("serve")),
    ] = 1.0
    max_loras: Annotated[
        int | None,
        "number of LoRA adapters on the devices at a time, of which an iteration may use any; 0 for none; "
        "with it, adapters can be loaded while serving (default: as many as --lora gives, up to "
        f"{MAX_LORAS})",
        *(Whole(0, 4096), In("serve", "compile")),
    ] = None
    max_lora_rank: Annotated[
        int | None,
        "the greatest rank of a LoRA adapter that the devices have room for (default: the greatest of "
        f"--lora's, at least {MAX_LORA_RANK})",
        *(Whole(1, 4096), In("serve", "compile")),
    ] = None
    lora_extras: Annotated[
        Sequence[str] | None,
        "what LoRA adapters may change beside linear layers: embedding, head, experts, with commas; each "
        "takes room for --max-loras (default: what those of --lora change)",
        *(EachOf(LORA_EXTRAS), In("serve", "compile")),
    ] = None
    deterministic: Annotated[bool, "make each output bit for bit independent of other requests; slower"] = (
        False
    )
    overlap: Annotated[
        bool,
        "prepare and issue an iteration while the previous one runs; without it, --policy orca is exactly "
        "Algorithm 1",
    ] = True
    command_buffer_collectives: Annotated[
        bool,
        "with tensor parallelism, record collectives into CUDA graphs too: fewer launches, but hangs were "
        "reported",
        Also("worker"),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora_extras is not None:
            object.__setattr__(self, "lora_extras", tuple(self.lora_extras))


@dataclass(frozen=True, kw_only=True)
class ServingConfig(ServingOptions):
    """The resolved sizes of an engine.

    `coarse_buckets` pads iterations to fewer sizes, for GPUs (orca_jax/iteration/shape.py). `n_snapshots` of
    recurrent layers' states are kept for the prefix cache; 0 without such layers or without the cache.
    `n_draft_states` more are kept until it is known which drafts were right; 0 without drafts.
    `n_host_blocks` more blocks, of `host_block_bytes` each, fit in the host's memory, and `n_host_states`
    more snapshots, of `host_state_bytes` each; 0 without a host tier. `scheduling` says what the scheduler
    does beyond Algorithm 1. `iteration_costs` has the time of an iteration of each bucket, in any unit, which
    decides how many tokens are drafted; if it is empty all iterations cost the same.
    """

    n_slots: int = 16384
    max_batch_tokens: int = 2048
    max_loras: int = 0
    max_lora_rank: int = MAX_LORA_RANK
    lora_extras: Sequence[str] = ()
    coarse_buckets: Annotated[bool, "pad iterations to fewer sizes", In()] = False
    n_snapshots: Annotated[int, "recurrent states that the prefix cache keeps", In()] = 0
    n_draft_states: Annotated[int, "recurrent states that are kept after drafts", In()] = 0
    n_host_blocks: Annotated[int, "blocks that the prefix cache keeps in the host's memory", In()] = 0
    host_block_bytes: Annotated[int, "bytes of one of them, all stages together", In()] = 0
    n_host_states: Annotated[int, "recurrent states that it keeps in the host's memory", In()] = 0
    host_state_bytes: Annotated[int, "bytes of one of them, all stages together", In()] = 0
    scheduling: SchedulingConfig = ORCA
    iteration_costs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("n_slots", self.n_slots, self.block_size, 1 << 31)
        check_whole("n_snapshots", self.n_snapshots, 0, 1 << 22)
        check_whole("n_draft_states", self.n_draft_states, 0, 1 << 22)
        check_whole("n_host_blocks", self.n_host_blocks, 0, 1 << 31)
        check_whole("host_block_bytes", self.host_block_bytes, 0, 1 << 50)
        check_whole("n_host_states", self.n_host_states, 0, 1 << 31)
        check_whole("host_state_bytes", self.host_state_bytes, 0, 1 << 50)
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
        sizes["iteration_costs"] = tuple(sizes.get("iteration_costs", ()))  # JSON has lists
        return cls(**sizes, scheduling=SchedulingConfig(**scheduling))

    def recorded(self) -> dict[str, Any]:
        """The fields as `dataclasses.asdict` gives them, but `scheduling_policy` is called `order`."""
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
    snapshot_bytes: Annotated[
        int | None,
        "hybrid models: maximum bytes on each device of recurrent states that the prefix cache keeps; 0: no "
        "prefix cache (default: a quarter of the memory for keys and values, and at most 8 states for each "
        "place of a batch)",
        Whole(0, 1 << 50),
        Also("plan"),
    ] = None
    kv_host_bytes: Annotated[
        int,
        "maximum bytes of host memory, all stages together, for blocks that the prefix cache evicts from the "
        "devices; a prompt that begins with them reads them in instead of computing them; 0: none",
        *(Whole(0, 1 << 50), Also("compile")),
    ] = 0
    kv_disk: Annotated[
        Path | str | None,
        "directory for blocks of the host tier, which are found again after a restart; it needs "
        "--kv-host-bytes, through which they are read (default: none)",
    ] = None
    kv_disk_bytes: Annotated[int, "maximum bytes of the files in --kv-disk", Whole(1 << 16, 1 << 50)] = (
        16 << 30
    )
    kv_host_bandwidth: Annotated[
        float | None,
        "bytes/s from the host's memory to the devices: blocks are read in only where that is quicker than "
        "computing their tokens, by the cost model (default: the links of a GPU's data sheet; on a CPU "
        "reading counts as quicker)",
        check_rate,
    ] = None
    kv_disk_bandwidth: Annotated[
        float | None,
        "bytes/s from --kv-disk to the host's memory, for the same choice (default: reading counts as "
        "quicker)",
        check_rate,
    ] = None
    kv_transfer_bandwidth: Annotated[
        float | None,
        "bytes/s from other servers, for the same choice (default: reading counts as quicker)",
        *(check_rate, In("serve")),
    ] = None
    role: Annotated[
        Role,
        "prefill: computes prompts, whose keys and values other servers fetch; decode: fetches them and "
        "generates; both: all of it, and for other servers only with --kv-transfer-address",
        In("serve"),
    ] = "both"
    kv_transfer_address: Annotated[
        str | None,
        "host:port at which other servers fetch keys and values from this one; port 0 is any free port "
        "(default: 127.0.0.1:0 with --role prefill, otherwise none)",
        *(check_host_and_port, In("serve")),
    ] = None
    kv_lease_seconds: Annotated[
        float, "seconds for which a finished prompt is kept for another server", *(check_timeout, In("serve"))
    ] = 30.0
    kv_transfer_seconds: Annotated[
        float,
        "seconds in which a prompt, and then each chunk, must come from another server; what does not is "
        "computed here",
        *(check_timeout, In("serve")),
    ] = 10.0
    adapters: Annotated[
        Mapping[str, str | Path] | None,
        "a LoRA adapter in PEFT's format, which requests choose by its name (docs/adapters.md); give the "
        "flag once for each",
        *(Named("lora"), check_names, In("serve")),
    ] = None
    lora_host_bytes: Annotated[
        int,
        "maximum bytes of LoRA adapters in the host's memory; others are read from disk again",
        *(Whole(0, 1 << 50), In("serve")),
    ] = 4 << 30

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapters and self.max_loras == 0:
            raise ConfigError(
                f"max_loras is 0, and there are {len(self.adapters)} LoRA adapters; raise it, or leave lora "
                "out"
            )
        self.filled(n_slots=self.block_size, max_batch_tokens=1 << 20)
        if self.kv_host_bytes and not self.scheduling.prefix_caching:
            raise ConfigError(
                f"kv_host_bytes is {self.kv_host_bytes}, and there is no prefix cache, whose blocks it would "
                "keep; leave it out, or leave out what excludes the prefix cache (prefix_caching=False, "
                "policy 'orca', deterministic)"
            )

    @property
    def scheduling(self) -> SchedulingConfig:
        """The scheduler's resolved options. Raises ConfigError."""
        defaults = ORCA if self.policy == "orca" or self.deterministic else SchedulingConfig()
        asked = {each.name: getattr(self, each.name) for each in fields(SchedulingOptions)}
        return replace(defaults, **{name: value for name, value in asked.items() if value is not None})

    def filled(
        self,
        *,
        n_slots: int,
        max_batch_tokens: int,
        coarse_buckets: bool = False,
        n_snapshots: int = 0,
        n_draft_states: int = 0,
        n_host_blocks: int = 0,
        host_block_bytes: int = 0,
        n_host_states: int = 0,
        host_state_bytes: int = 0,
    ) -> ServingConfig:
        """Sizes with the arguments in place of None. Raises ConfigError."""
        asked: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(ServingOptions)}
        sizes = {"n_slots": n_slots, "max_batch_tokens": max_batch_tokens}
        sizes |= {"max_loras": min(len(self.adapters or ()), MAX_LORAS), "max_lora_rank": MAX_LORA_RANK}
        sizes |= {"lora_extras": ()}
        asked |= {name: value for name, value in sizes.items() if asked[name] is None}
        given: dict[str, Any] = {"coarse_buckets": coarse_buckets, "n_snapshots": n_snapshots}
        given |= {"n_draft_states": n_draft_states}
        given |= {"n_host_blocks": n_host_blocks, "host_block_bytes": host_block_bytes}
        given |= {"n_host_states": n_host_states, "host_state_bytes": host_state_bytes}
        return ServingConfig(**asked, **given, scheduling=self.scheduling)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Options):
    """The split of a model over devices, and the processes of its stages (ORCA 4.1, Figures 6 and 7).

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
        "how tokens reach experts if each expert is whole on one device; gather: every device gets all "
        "tokens; exchange: each device sends tokens to the devices of their experts; auto: whichever is "
        "faster by the cost model",
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
        return self.pipeline_parallel * self.tensor_parallel

    @property
    def in_this_process(self) -> bool:
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
        "seconds within which --max-restarts counts lost workers",
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
        "compile every program before the engine is ready, otherwise each on first use, while its request "
        "waits; worker processes always compile ahead",
        *(Served(True), In("serve")),
    ] = False
    ready_early: Annotated[
        bool,
        "on a CPU: be ready once the programs of a few sizes are compiled, which every batch fits in; the "
        "others, which save padding, are compiled while serving. A deterministic engine and one with an "
        "encoder wait for all",
        *(Served(True), In("serve")),
    ] = False
    on_compile: Annotated[
        OnCompile,
        "what happens if a program is missing once the engine is ready; warn: it is compiled while requests "
        "wait; error: the engine fails",
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
        "a directory, a GGUF file, a name on the Hugging Face hub, package.file:function for a model of your "
        "own, or a preset's name with --load-format dummy (default: the demo model)",
    ] = None
    _: KW_ONLY
    load_format: Annotated[
        LoadFormat,
        "dummy: random weights of a preset or directory, without a tokenizer unless one is named; "
        "packed: experts in MXFP4 stay packed",
        Also("worker", "plan"),
    ] = "auto"
    quantization: Annotated[
        Rounding | None,
        "round the matrices of the layers to these numbers as they are loaded, with a scale for each output "
        "(int8, fp8) or for 32 inputs (int4); quantized checkpoints are kept as they are without it",
        Also("worker", "plan"),
    ] = None
    dtype: Annotated[
        Dtype | None,
        "data type of weights, keys and values (default: float32 on a CPU, bfloat16 elsewhere)",
        Also("worker", "plan"),
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        "data type of the KV cache; int8, fp8: keys and values rounded to eight bits, with a scale for each "
        "head of each token, so that about 1.9 times as many tokens fit as in 16 bits; auto: that of --dtype",
        Also("worker", "plan"),
    ] = "auto"
    tokenizer: Annotated[
        str | Path | None,
        "a tokenizer.json, or a directory with one and perhaps a chat template, to use instead of the "
        "model's (default: the model's)",
        In("serve", "generate", "chat"),
    ] = None
    generation_config: Annotated[
        str | Path,
        "directory of the generation_config.json with defaults for requests and end-of-sequence tokens; "
        "auto: the model's directory; none: do not read one",
        In("serve", "generate", "chat"),
    ] = "auto"
    pooling: Annotated[
        Pooling | None,
        "pooling of embeddings if a request does not set it, instead of the checkpoint's 1_Pooling; "
        "last, cls: the last or the first token's state; mean: the mean over all tokens (default: the "
        "checkpoint's, else cls for models like BERT, and last)",
        In("serve"),
    ] = None
    seed: Annotated[
        int | None,
        "seed of dummy weights (0 if not set), and of requests that set none (default: random)",
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
        "maximum size of the file of --record in bytes; the recording then stops",
        "logging",
        *(Whole(1 << 16, 1 << 50), In("serve")),
    ] = 1 << 30

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.generation_config, str | Path) or not str(self.generation_config):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"generation_config is {self.generation_config!r}; it must be 'auto', 'none' or a directory"
            )
        if (self.adapters or self.max_loras) and self.record is not None:
            raise ConfigError(
                "LoRA adapters (lora, max_loras) do not work with record yet; leave one of the two out"
            )
        if self.kv_bandwidths:
            self._check_bandwidths()
        if self.kv_disk is not None:
            self._check_disk()
        if self.gives_blocks or self.takes_blocks:
            self._check_transfer()
        if self.drafts_on_device and not self.in_this_process:
            raise ConfigError(
                f"speculative is {self.speculative!r}; a draft model does not work with workers or "
                "worker_processes yet; leave one of the two out, or choose ngram or suffix"
            )
        if self.eagle3_head is not None and self.pipeline_parallel != 1:
            raise ConfigError(
                f"speculative is {self.speculative!r} and pipeline_parallel is {self.pipeline_parallel}; an "
                "EAGLE-3 head reads states of layers that several stages have, and none sends them on yet; "
                "leave pipeline_parallel at 1, or choose mtp, ngram or suffix"
            )
        if self.workers is not None:
            self._refuse_worker_options()
        elif self.on_compile == "error" and self.in_this_process and not self.compile_ahead:
            raise ConfigError(
                'on_compile="error" needs compile_ahead, without which no program could be compiled; set '
                "compile_ahead, or leave on_compile out"
            )

    @property
    def gives_blocks(self) -> bool:
        """Whether other servers fetch prompts from this one."""
        return self.role == "prefill" or (self.role == "both" and self.kv_transfer_address is not None)

    @property
    def takes_blocks(self) -> bool:
        """Whether this server fetches prompts from others."""
        return self.role == "decode" or (self.role == "both" and self.kv_transfer_address is not None)

    @property
    def kv_bandwidths(self) -> list[str]:
        """The names of the bandwidths that are given."""
        names = ("kv_host_bandwidth", "kv_disk_bandwidth", "kv_transfer_bandwidth")
        return [name for name in names if getattr(self, name) is not None]

    def _check_bandwidths(self) -> None:
        name = self.kv_bandwidths[0]
        if not self.kv_host_bytes:
            raise ConfigError(
                f"{name} is {getattr(self, name):g}, and kv_host_bytes is 0, so that nothing is read; leave "
                "one out, or add the other"
            )
        if not self.in_this_process:
            raise ConfigError(
                f"{name} does not work with workers or worker_processes yet; leave one of the two out"
            )

    def _check_transfer(self) -> None:
        name = f"role {self.role!r}" + (" with kv_transfer_address" if self.role == "both" else "")
        excluded = {
            "workers or worker_processes": not self.in_this_process,
            "record": self.record is not None,
        }
        for other, is_asked in excluded.items():
            if is_asked:
                raise ConfigError(f"{name} does not work with {other} yet; leave one of the two out")
        if self.role == "decode" and self.kv_transfer_address is not None:
            raise ConfigError(
                f"kv_transfer_address is {self.kv_transfer_address!r}, and role 'decode' gives nothing to "
                "other servers; leave it out, or choose role 'both'"
            )
        if not self.kv_host_bytes:
            raise ConfigError(
                f"{name} moves keys and values through the host's memory, and kv_host_bytes is 0; set it to "
                "room for several prompts"
            )

    def _check_disk(self) -> None:
        if not self.in_this_process:
            raise ConfigError(
                "kv_disk does not work with workers or worker_processes yet; leave one of the two out"
            )
        if not self.kv_host_bytes:
            raise ConfigError(
                f"kv_disk is {str(self.kv_disk)!r}, and kv_host_bytes is 0: blocks are read from the disk "
                "through the host's memory; add kv_host_bytes"
            )

    def _refuse_worker_options(self) -> None:
        set_per_worker = {
            *("attention", "memory_fraction", "on_compile", "command_buffer_collectives", "expert_exchange"),
        }
        for each in fields(self):
            name = each.name
            if name in set_per_worker and getattr(self, name) != each.default:
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
