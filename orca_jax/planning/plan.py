"""What a model needs on given devices, and what to expect of them: memory, slots, floors (`orca plan`).

Pure arithmetic on the cost model and on the stages' memory. The sizes are chosen by the same code as an
engine's (sizes.py), so that a plan says what `orca serve` would do there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Literal

from orca_jax.config import Dtype, ParallelConfig, ServingConfig, Sizes
from orca_jax.errors import ConfigError
from orca_jax.families.model_config import ModelConfig
from orca_jax.planning.cost_model import IterationShape, Operation, hop_bytes, operations, shared_bytes
from orca_jax.planning.known_devices import CPU, MEMORY_FRACTION, MODEST_KV_BYTES, KnownDevice
from orca_jax.planning.sizes import n_rows, serving_config
from orca_jax.planning.stage_layers import check_split, stage_layers
from orca_jax.planning.stage_memory import (
    ITEMSIZE,
    StageMemory,
    StageRoom,
    shared_vocabulary,
    stage_weight_bytes,
)
from orca_jax.scheduling.kv_manager import round_up

MAX_BS = 4096  # ServingConfig's bound
_MOST_STAGES = 64

Phase = Literal["increment", "initiation"]
Bound = Literal["latency", "slots", "limit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What is planned for: a model on devices of a kind, and the sizes that are asked for.

    `context` is what a request has in the cache on average, in tokens, for the floors. `temporaries` are
    XLA's own, of each stage, where it was asked: bytes of each device. Checked when made: raises ConfigError.
    """

    config: ModelConfig
    device: KnownDevice
    sizes: Sizes
    dtype: Dtype
    context: int
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    temporaries: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_split(self.config, self.parallel)
        if not 1 <= self.context <= self.config.n_positions:
            raise ConfigError(
                f"context is {self.context}; it must be from 1 to the model's {self.config.n_positions} "
                "positions"
            )

    @property
    def itemsize(self) -> int:
        """Bytes of an element of weights, keys and values."""
        return ITEMSIZE[self.dtype]

    @property
    def model(self) -> ModelConfig:
        """The model as it lies on the devices."""
        return shared_vocabulary(self.config, self.parallel.tensor_parallel)

    @property
    def stages(self) -> list[range]:
        """The layers of each."""
        return stage_layers(self.config.n_layers, self.parallel.pipeline_parallel)

    @property
    def budget(self) -> int:
        """Bytes of each device that the engine may take."""
        fraction = self.sizes.memory_fraction
        if self.device.name == CPU:  # which is all the devices
            each = self.device.memory // self.parallel.n_devices
            return int(each * (1.0 if fraction is None else fraction))
        return int(self.device.memory * (MEMORY_FRACTION if fraction is None else fraction))

    def rooms(self) -> list[StageRoom]:
        """What each stage's devices have left beside the weights."""
        modest = None
        if self.device.name == CPU and self.sizes.memory_fraction is None:
            modest = MODEST_KV_BYTES // self.parallel.n_devices
        weights = [
            stage_weight_bytes(self.model, layers, self.parallel.tensor_parallel, self.itemsize)
            for layers in self.stages
        ]
        return [
            StageRoom(
                layers=layers,
                n_devices=self.parallel.tensor_parallel,
                itemsize=self.itemsize,
                attention=self.device.attention,
                free=self.budget - weight,
                modest=modest,
                temporaries=None if self.temporaries is None else self.temporaries[i],
            )
            for i, (layers, weight) in enumerate(zip(self.stages, weights, strict=True))
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One stage: its layers, what lies on each of its devices, and the slots that this leaves room for.

    `problem` says what does not fit; None where all does.
    """

    layers: range
    memory: StageMemory
    slots: int
    problem: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationFloor:
    """What no iteration of this kind can be faster than.

    `seconds` are those from the first stage's start to the last one's end, `interval` the slowest stage's:
    with a batch for each stage one comes out every `interval`. `bound` says what takes most of the time.
    """

    phase: Phase
    batch_size: int
    n_tokens: int
    seconds: float
    interval: float
    tokens_per_second: float
    bound: Literal["bandwidth", "matrix rate", "links"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The largest `max_bs` whose increment iteration stays within `budget` seconds at its floor.

    0 where not even one request does. `bound` says what keeps it from being larger: the latency, the slots
    for that many requests of `context` tokens, or the limit of what can be set.
    """

    budget: float
    max_bs: int
    seconds: float
    bound: Bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All of it. `serving` are the sizes that an engine would choose; `hint` is a split that would fit."""

    wanted: Wanted
    serving: ServingConfig
    stages: tuple[StagePlan, ...]
    floors: tuple[IterationFloor, ...]
    hint: str | None
    recommendation: Recommendation | None = None

    @property
    def fits(self) -> bool:
        """Whether every stage does."""
        return all(stage.problem is None for stage in self.stages)


def make_plan(wanted: Wanted, *, latency_budget: float | None = None) -> Plan:
    """The plan; with `latency_budget`, in seconds, a `max_bs` is recommended too. Raises ConfigError."""
    serving = serving_config(wanted.config, wanted.sizes, wanted.rooms())
    stages = _stage_plans(wanted, serving)
    sizes = _batch_sizes(serving.max_batch_size)
    floors = [iteration_floor(wanted, "increment", size) for size in sizes]
    floors += [
        iteration_floor(wanted, "initiation", size)
        for size in sizes
        if size * wanted.context <= serving.max_batch_tokens
    ]
    fits = all(stage.problem is None for stage in stages)
    return Plan(
        wanted=wanted,
        serving=serving,
        stages=tuple(stages),
        floors=tuple(floors),
        hint=None if fits else _split_that_fits(wanted),
        recommendation=None if latency_budget is None else recommend(wanted, latency_budget),
    )


def iteration_floor(wanted: Wanted, phase: Phase, batch_size: int) -> IterationFloor:
    """The floor of an iteration of `batch_size` requests of `wanted.context` tokens in one phase."""
    context, size = wanted.context, wanted.itemsize
    n_input = 1 if phase == "increment" else context
    shape = IterationShape([n_input] * batch_size, [context] * batch_size)
    device, n_shards = wanted.device, wanted.parallel.tensor_parallel
    rates = device.rates(wanted.dtype)
    times: list[float] = []
    parts = {"bandwidth": 0.0, "matrix rate": 0.0, "links": 0.0}
    for layers in wanted.stages:
        found: Sequence[Operation] = operations(
            wanted.model, shape, weight_bytes=size, kv_bytes=size, layers=layers, n_shards=n_shards
        )
        shared = shared_bytes(wanted.model, shape, weight_bytes=size, layers=layers, n_shards=n_shards)
        links = shared / (device.inside if n_shards <= device.per_machine else device.between)
        total = links
        for op in found:
            moved, computed = op.n_bytes / rates.bandwidth, op.n_flops / rates.matrix_rate
            total += max(moved, computed)
            parts["bandwidth" if moved >= computed else "matrix rate"] += max(moved, computed)
        parts["links"] += links
        times.append(total)
    for i in range(1, wanted.parallel.pipeline_parallel):
        same_machine = (i * n_shards - 1) // device.per_machine == i * n_shards // device.per_machine
        hop = hop_bytes(wanted.model, shape, weight_bytes=size)
        times.append(hop / (device.inside if same_machine else device.between))
        parts["links"] += times[-1]
    interval = max(times)  # a link is a stage of its own: the devices go on meanwhile
    bound = max(parts, key=lambda name: parts[name])
    assert bound == "bandwidth" or bound == "matrix rate" or bound == "links"
    return IterationFloor(
        phase=phase,
        batch_size=batch_size,
        n_tokens=batch_size * n_input,
        seconds=sum(times),
        interval=interval,
        tokens_per_second=batch_size / interval,
        bound=bound,
    )


def recommend(wanted: Wanted, budget: float) -> Recommendation:
    """The largest `max_bs` within `budget` seconds (ORCA 4.2 leaves it to the operator). Raises ConfigError.

    An iteration that has an initiation in it takes longer; the budget is for the time between two tokens of
    a request while nobody new comes.
    """
    if not budget > 0:
        raise ConfigError(f"latency_budget is {budget:g} seconds; it must be above 0")

    def obstacle(size: int) -> Bound | None:
        if size > MAX_BS:
            return "limit"
        if iteration_floor(wanted, "increment", size).seconds > budget:
            return "latency"
        return None if _holds(wanted, size) else "slots"

    low, high = 0, MAX_BS + 1  # low is possible, high is not; each obstacle stays one for larger sizes
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if obstacle(middle) is None else (low, middle)
    bound = obstacle(high)
    assert bound is not None
    seconds = iteration_floor(wanted, "increment", low).seconds if low else 0.0
    return Recommendation(budget=budget, max_bs=low, seconds=seconds, bound=bound)


def _holds(wanted: Wanted, max_bs: int) -> bool:
    """Whether there are slots for as many requests of `context` tokens as keep every stage busy."""
    asked = wanted.sizes
    if asked.max_batch_tokens is not None and asked.max_batch_tokens < max_bs:
        return False
    n_workers = wanted.parallel.pipeline_parallel
    needed = n_workers * max_bs * round_up(wanted.context, asked.block_size)
    if asked.n_slots is not None and asked.n_slots < needed:
        return False
    rows = n_rows(max_bs, n_workers=n_workers)
    before = serving_config(wanted.config, asked, wanted.rooms())
    after = serving_config(wanted.config, replace(asked, max_batch_size=max_bs), wanted.rooms())
    for room in wanted.rooms():
        plain = replace(room, temporaries=None)
        if room.temporaries is not None:  # XLA told them for other sizes: the difference is by arithmetic
            both = (plain.memory(wanted.model, one, rows).temporaries for one in (after, before))
            room = replace(room, temporaries=max(0, room.temporaries + next(both) - next(both)))
        if room.slots(room.memory(wanted.model, after, rows)) < needed:
            return False
    return True


def _batch_sizes(max_bs: int) -> list[int]:
    """Powers of two up to `max_bs`, and that."""
    sizes = [1 << i for i in range(max_bs.bit_length()) if 1 << i < max_bs]
    return [*sizes, max_bs]


def _stage_plans(wanted: Wanted, serving: ServingConfig) -> list[StagePlan]:
    rows = n_rows(serving.max_batch_size, n_workers=wanted.parallel.pipeline_parallel)
    whole = round_up(wanted.config.n_positions, serving.block_size)
    needed = max(whole, wanted.sizes.n_slots or 0)
    plans: list[StagePlan] = []
    for i, room in enumerate(wanted.rooms()):
        memory = room.memory(wanted.model, serving, rows)
        slots = room.slots(memory)
        problem = None
        if slots < needed:
            what = "n_slots" if needed > whole else "one request of the model's full length"
            problem = (
                f"stage {i + 1} needs {_gib(memory.weights)} of weights, {_gib(memory.tables)} of tables, "
                f"{_gib(memory.temporaries)} of temporaries and {_gib(needed * memory.slot)} for the "
                f"{needed} slots of {what} on each device, and may take {_gib(wanted.budget)}"
            )
        plans.append(StagePlan(layers=room.layers, memory=memory, slots=slots, problem=problem))
    return plans


def _fits(wanted: Wanted, n_stages: int, n_devices: int) -> bool:
    parallel = replace(wanted.parallel, pipeline_parallel=n_stages, tensor_parallel=n_devices)
    other = replace(wanted, parallel=parallel, temporaries=None)
    serving = serving_config(other.config, other.sizes, other.rooms())
    return all(stage.problem is None for stage in _stage_plans(other, serving))


def _split_that_fits(wanted: Wanted) -> str:
    """What to change so that it fits, by arithmetic."""
    config, device = wanted.config, wanted.device
    if device.name == CPU:
        return "stages and parts share a CPU's memory, so no split helps; use a smaller model or more memory"
    common = gcd(config.n_heads, *config.ffn_sizes)
    tensors = [n for n in range(1, device.per_machine + 1) if common % n == 0]
    most = min(config.n_layers, _MOST_STAGES)
    n_stages, n_devices = wanted.parallel.pipeline_parallel, wanted.parallel.tensor_parallel
    pipeline = next((n for n in range(1, most + 1) if _fits(wanted, n, n_devices)), None)
    tensor = next((n for n in tensors if _fits(wanted, n_stages, n)), None)
    ways = [f"--pipeline-parallel {pipeline}"] * (pipeline is not None)
    ways += [f"--tensor-parallel {tensor}"] * (tensor is not None)
    if ways:
        return f"use {' or '.join(ways)}"
    both = [(p * t, -t, p, t) for t in tensors for p in range(1, most + 1) if _fits(wanted, p, t)]
    if both:
        *_, p, t = min(both)
        return f"use --pipeline-parallel {p} --tensor-parallel {t}"
    return (
        f"no split over up to {most} stages of up to {tensors[-1]} devices fits; use devices with more memory"
    )


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 30):.2f} GiB"
