"""`orca plan`: a model's memory, slots and time floors on given devices.

It is arithmetic on the cost model and the stages' memory. The same code as an engine's (sizes.py) chooses the
sizes, so a plan shows what `orca serve` would do.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from orca_jax.config import Attention, Dtype, ParallelConfig, ServingConfig, Sizes
from orca_jax.errors import ConfigError
from orca_jax.families.model_config import Layer, ModelConfig
from orca_jax.families.parameters import stage_bytes
from orca_jax.iteration.flat_batch import batch_sizes
from orca_jax.iteration.shape import EngineShape, bucket_for, bucket_sizes
from orca_jax.planning.cost_model import (
    IterationShape,
    Operation,
    encoder_operations,
    encoder_shared_bytes,
    operations,
)
from orca_jax.planning.device_traffic import hop_bytes, shared_bytes
from orca_jax.planning.draft_model import check_draft_model, draft_memory, draft_split, with_draft
from orca_jax.planning.expert_exchange import ExchangeRule
from orca_jax.planning.known_devices import CPU, MEMORY_FRACTION, MODEST_KV_BYTES, KnownDevice
from orca_jax.planning.sizes import batch_tokens, engine_shape, request_slots, serving_config
from orca_jax.planning.stage_layers import check_split, stage_layers, tensor_degrees
from orca_jax.planning.stage_memory import ITEMSIZE, DraftMemory, StageMemory, StageRoom

MAX_BS = 4096  # ServingConfig's bound
_MOST_STAGES = 64

Phase = Literal["decode", "prefill"]  # the paper's increment and initiation
Bound = Literal["latency", "slots", "limit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTarget:
    """A model, its devices and the requested sizes.

    The floors assume that a request has `context` tokens in the cache on average, and as many encoder tokens
    in a model with an encoder. `temporaries` is XLA's figure for each stage in bytes per device, if XLA was
    asked. `draft` is a draft model (`draft_split` says on which devices). Raises ConfigError if invalid.
    """

    config: ModelConfig
    device: KnownDevice
    sizes: Sizes
    dtype: Dtype
    context: int
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    temporaries: tuple[int, ...] | None = None
    draft: ModelConfig | None = None

    def __post_init__(self) -> None:
        check_split(self.config, self.parallel)
        if self.draft is not None:
            check_draft_model(self.sizes.speculative, self.draft)
        encoder = self.config.encoder
        longest = min(self.config.n_positions, encoder.n_positions if encoder else self.config.n_positions)
        if not 1 <= self.context <= longest:
            raise ConfigError(
                f"context is {self.context}; it must be from 1 to the model's {longest} positions"
            )

    @property
    def itemsize(self) -> int:
        """The bytes of an element of weights, keys and values."""
        return ITEMSIZE[self.dtype]

    @property
    def model(self) -> ModelConfig:
        """The model as its devices hold it: the vocabulary padded, K/V heads repeated where needed."""
        return self.config.for_devices(self.parallel.tensor_parallel)

    @property
    def stages(self) -> list[range]:
        """The layers of each stage."""
        return stage_layers(self.config.n_layers, self.parallel.pipeline_parallel)

    @property
    def budget(self) -> int:
        """The bytes of each device that the engine may use."""
        fraction = self.sizes.memory_fraction
        if self.device.name == CPU:  # one CPU stands for all devices
            each = self.device.memory // self.parallel.n_devices
            return int(each * (1.0 if fraction is None else fraction))
        return int(self.device.memory * (MEMORY_FRACTION if fraction is None else fraction))

    def _attention(self, config: ModelConfig) -> Attention:
        """The device's kind of attention, or its replacement for a model that no GPU kernel can compute."""
        attentions = [layer.attention for layer in config.layers if layer.attention is not None]
        in_pure_jax = (one.scores.alibi or one.kv_code or one.scores.chunked for one in attentions)
        latent = any(one.latent for one in attentions) and self.device.attention != "kernel"
        differ = len({(one.head_size, one.n_kv_heads) for one in attentions}) > 1
        pure_jax = config.encoder is not None or latent or differ or any(in_pure_jax)
        if pure_jax and self.device.name != CPU:
            return "static"
        sinks = any(one.scores.sinks for one in attentions)
        return "cudnn" if sinks and self.device.attention == "kernel" else self.device.attention

    def exchanges(self, layer: Layer, n_tokens: int, *, last: bool) -> bool:
        """Whether the engine exchanges tokens in this layer in an iteration of `n_tokens`, padded.

        `last`: after the layer's attention there is one token per request.
        """
        n_devices, asked = self.parallel.tensor_parallel, self.parallel.expert_exchange
        rule = ExchangeRule(device=self.device, n_devices=n_devices, asked=asked)
        most = max(n_tokens, batch_tokens(self.config, self.sizes))
        padded = bucket_for(n_tokens, bucket_sizes(most, coarse=self.device.name != CPU))
        width = self.config.hidden_size * self.itemsize
        return rule(layer, width, min(padded, self.sizes.max_batch_size) if last else padded)

    def rooms(self) -> list[StageRoom]:
        """Each stage's memory after loading the weights."""
        modest = None
        if self.device.name == CPU and self.sizes.memory_fraction is None:
            modest = MODEST_KV_BYTES // self.parallel.n_devices
        weights = [
            stage_bytes(self.model, layers, self.parallel.tensor_parallel, self.itemsize)
            for layers in self.stages
        ]
        rooms = [
            StageRoom(
                layers=layers,
                n_devices=self.parallel.tensor_parallel,
                itemsize=self.itemsize,
                attention=self._attention(self.config),
                free=self.budget - weight,
                modest=modest,
                temporaries=None if self.temporaries is None else self.temporaries[i],
            )
            for i, (layers, weight) in enumerate(zip(self.stages, weights, strict=True))
        ]
        return rooms if self.draft is None else with_draft(rooms, self._draft_memory(self.draft))

    def _draft_memory(self, draft: ModelConfig) -> DraftMemory:
        n_devices = draft_split(draft, self.parallel).tensor_parallel
        alone = StageRoom(
            layers=range(draft.n_layers),
            n_devices=n_devices,
            itemsize=self.itemsize,
            attention=self._attention(draft),
            free=self.budget,
        )
        return draft_memory(draft.for_devices(n_devices), self.sizes, alone)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """A stage's layers, its memory per device, and the slots that fit.

    `problem` says what does not fit, or is None. `draft` is what a draft model takes besides.
    """

    layers: range
    memory: StageMemory
    slots: int
    problem: str | None
    draft: DraftMemory | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationFloor:
    """The least time of an iteration of one kind.

    `seconds` runs from the first stage's start to the last stage's end. `interval` is the slowest stage's
    time: with a batch in every stage, one iteration finishes every `interval`. `bound` names what takes most
    of the time.
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
    """The largest `max_bs` whose decode iteration stays within `budget` seconds at its floor; 0 if none does.

    `bound` says what prevents a larger one: the latency, the slots for that many requests of `context`
    tokens, or the limit of the setting.
    """

    budget: float
    max_bs: int
    seconds: float
    bound: Bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A plan. `serving` has the sizes that an engine would choose; `hint` suggests a split that fits."""

    target: PlanTarget
    serving: ServingConfig
    stages: tuple[StagePlan, ...]
    floors: tuple[IterationFloor, ...]
    hint: str | None
    recommendation: Recommendation | None = None

    @property
    def fits(self) -> bool:
        """Whether every stage fits."""
        return all(stage.problem is None for stage in self.stages)

    @property
    def forward_programs(self) -> tuple[int, int]:
        """Numbers of a stage's forward programs that are compiled: for any batch, and for decode alone."""
        target = self.target
        serving = replace(self.serving, coarse_buckets=target.device.name != CPU)
        shape = engine_shape(target.model, serving, n_workers=target.parallel.pipeline_parallel)
        layouts = batch_sizes(shape, target.rooms()[0].attention).layouts
        n_decode = sum(layout.one_each for layout in layouts)
        return len(layouts) - n_decode, n_decode


def make_plan(target: PlanTarget, *, latency_budget: float | None = None) -> Plan:
    """Make a plan; with `latency_budget`, in seconds, also recommend a `max_bs`. Raises ConfigError."""
    serving = serving_config(target.model, target.sizes, target.rooms(), device=target.device.name)
    stages = _stage_plans(target, serving)
    sizes = [1 << i for i in range((serving.max_batch_size - 1).bit_length())]  # powers of two below it
    sizes.append(serving.max_batch_size)
    floors = [iteration_floor(target, "decode", size) for size in sizes]
    prompt = min(target.context, serving.max_batch_tokens)
    floors += [
        iteration_floor(replace(target, context=prompt), "prefill", size)
        for size in sizes
        if size * prompt <= serving.max_batch_tokens
    ]
    fits = all(stage.problem is None for stage in stages)
    return Plan(
        target=target,
        serving=serving,
        stages=tuple(stages),
        floors=tuple(floors),
        hint=None if fits else _split_that_fits(target),
        recommendation=None if latency_budget is None else recommend(target, latency_budget),
    )


def iteration_floor(target: PlanTarget, phase: Phase, batch_size: int) -> IterationFloor:
    """The floor of an iteration of `batch_size` requests of `target.context` tokens in one phase.

    With an encoder, prefill runs the encoder over `context` tokens, and the decoder over one.
    """
    context, size = target.context, target.itemsize
    reads = [] if target.config.encoder is None else [context] * batch_size
    begins = phase == "prefill"
    n_input = context if begins and not reads else 1
    shape = IterationShape([n_input] * batch_size, [1 if begins and reads else context] * batch_size, reads)
    device, n_shards = target.device, target.parallel.tensor_parallel
    rates = device.rates(target.dtype)
    times: list[float] = []
    parts = {"bandwidth": 0.0, "matrix rate": 0.0, "links": 0.0}
    for layers in target.stages:
        stage_operations: Sequence[Operation] = operations(
            target.model,
            shape,
            weight_bytes=size,
            kv_bytes=size,
            layers=layers,
            n_shards=n_shards,
            in_both_forms=device.name == CPU,
        )
        shared = shared_bytes(
            target.model,
            shape,
            weight_bytes=size,
            layers=layers,
            n_shards=n_shards,
            exchanges=partial(target.exchanges, n_tokens=batch_size * n_input),
        )
        if begins and reads:
            stage_operations = [
                *encoder_operations(
                    target.model, reads, weight_bytes=size, kv_bytes=size, layers=layers, n_shards=n_shards
                ),
                *stage_operations,
            ]
            shared += encoder_shared_bytes(
                target.model, sum(reads), weight_bytes=size, layers=layers, n_shards=n_shards
            )
        total = links = shared / device.ring_rate(n_shards)
        for op in stage_operations:
            moved, computed = op.n_bytes / rates.bandwidth, op.n_flops / rates.matrix_rate
            total += max(moved, computed)
            parts["bandwidth" if moved >= computed else "matrix rate"] += max(moved, computed)
        parts["links"] += links
        times.append(total)
    for i in range(1, target.parallel.pipeline_parallel):
        same_machine = (i * n_shards - 1) // device.per_machine == i * n_shards // device.per_machine
        hop = hop_bytes(target.model, shape, weight_bytes=size)
        hop += begins * sum(reads) * target.model.hidden_size * size  # the encoder's output
        times.append(hop / (device.inside if same_machine else device.between))
        parts["links"] += times[-1]
    interval = max(times)  # a link counts as a stage: devices compute during transfers
    bound = max(parts, key=lambda name: parts[name])
    assert bound == "bandwidth" or bound == "matrix rate" or bound == "links"
    return IterationFloor(
        phase=phase,
        batch_size=batch_size,
        n_tokens=batch_size * (context if begins else 1),
        seconds=sum(times),
        interval=interval,
        tokens_per_second=batch_size / interval,
        bound=bound,
    )


def recommend(target: PlanTarget, budget: float) -> Recommendation:
    """The largest `max_bs` within `budget` seconds (ORCA 4.2 leaves it to the operator). Raises ConfigError.

    The budget is for the time between two tokens of a request while no request is in prefill: an iteration
    with a prefill takes longer.
    """
    if not budget > 0:
        raise ConfigError(f"latency_budget is {budget:g} seconds; it must be above 0")

    def obstacle(size: int) -> Bound | None:
        if size > MAX_BS:
            return "limit"
        if iteration_floor(target, "decode", size).seconds > budget:
            return "latency"
        return None if _holds(target, size) else "slots"

    # Every obstacle also applies to larger sizes.
    most = bisect_left(range(1, MAX_BS + 1), True, key=lambda size: obstacle(size) is not None)
    bound = obstacle(most + 1)
    assert bound is not None
    seconds = iteration_floor(target, "decode", most).seconds if most else 0.0
    return Recommendation(budget=budget, max_bs=most, seconds=seconds, bound=bound)


def _holds(target: PlanTarget, max_bs: int) -> bool:
    """Whether there are slots for `max_bs` requests of `context` tokens in every stage at once."""
    requested = target.sizes
    if requested.max_batch_tokens is not None and requested.max_batch_tokens < max_bs:
        return False
    n_workers = target.parallel.pipeline_parallel
    context = target.context
    each = request_slots(target.config, context, context, block_size=requested.block_size)
    needed = n_workers * max_bs * each
    if requested.n_slots is not None and requested.n_slots < needed:
        return False
    before = _shape(target, serving_config(target.model, requested, target.rooms()))
    after = _shape(
        target, serving_config(target.model, replace(requested, max_batch_size=max_bs), target.rooms())
    )
    for room in target.rooms():
        if room.temporaries is not None:  # XLA's figure is for other sizes: add the estimated difference
            plain = replace(room, temporaries=None)
            growth = plain.memory(target.model, after).temporaries
            growth -= plain.memory(target.model, before).temporaries
            room = replace(room, temporaries=max(0, room.temporaries + growth))
        if room.slots(room.memory(target.model, after)) < needed:
            return False
    return True


def _shape(target: PlanTarget, serving: ServingConfig) -> EngineShape:
    return engine_shape(target.config, serving, n_workers=target.parallel.pipeline_parallel)


def _stage_plans(target: PlanTarget, serving: ServingConfig) -> list[StagePlan]:
    shape = _shape(target, serving)
    config = target.config
    longest_read = config.encoder.n_positions if config.encoder else 0
    whole = request_slots(config, config.n_positions, longest_read, block_size=serving.block_size)
    needed = max(whole, target.sizes.n_slots or 0)
    plans: list[StagePlan] = []
    for i, room in enumerate(target.rooms()):
        memory = room.memory(target.model, shape)
        slots = room.slots(memory)
        problem = None
        if slots < needed:
            use = "n_slots" if needed > whole else "one request of the model's full length"
            states = f"{_gib(memory.states)} of states, " if memory.states else ""
            states += f"{_gib(memory.snapshots)} of their snapshots, " if memory.snapshots else ""
            states += f"{_gib(memory.draft_states)} of states after drafts, " if memory.draft_states else ""
            states += f"{_gib(room.draft.fixed)} of the draft model, " if room.draft else ""
            in_slots = _gib(needed * room.slot_bytes(memory))
            problem = (
                f"stage {i + 1} needs {_gib(memory.weights)} of weights, {_gib(memory.tables)} of tables, "
                f"{states}{_gib(memory.temporaries)} of temporaries and {in_slots} for the "
                f"{needed} slots of {use} on each device, and may use {_gib(target.budget)}"
            )
        plans.append(
            StagePlan(layers=room.layers, memory=memory, slots=slots, problem=problem, draft=room.draft)
        )
    return plans


def _fits(target: PlanTarget, n_stages: int, n_devices: int) -> bool:
    # A quick answer first, as a hint may try 64 stages by 8 devices: the weights of the mean stage.
    whole = stage_bytes(target.model, range(target.config.n_layers), n_devices, target.itemsize)
    if whole > n_stages * target.budget:
        return False
    # The exchange of tokens, which not every split allows, takes no memory, so it is left at its default.
    parallel = ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=n_devices)
    other = replace(target, parallel=parallel, temporaries=None)
    serving = serving_config(other.model, other.sizes, other.rooms())
    return all(stage.problem is None for stage in _stage_plans(other, serving))


def _split_that_fits(target: PlanTarget) -> str:
    """Suggest, by arithmetic, a change that makes the model fit."""
    config, device = target.config, target.device
    if device.name == CPU:
        return "all stages share the CPU's memory, so no split helps; use a smaller model or more memory"
    tensors = tensor_degrees(config, device.per_machine)
    most = min(config.n_layers, _MOST_STAGES)
    n_stages, n_devices = target.parallel.pipeline_parallel, target.parallel.tensor_parallel
    pipeline = next((n for n in range(1, most + 1) if _fits(target, n, n_devices)), None)
    tensor = next((n for n in tensors if _fits(target, n_stages, n)), None)
    ways = [f"--pipeline-parallel {pipeline}"] * (pipeline is not None)
    ways += [f"--tensor-parallel {tensor}"] * (tensor is not None)
    if ways:
        return f"use {' or '.join(ways)}"
    both = sorted((p * t, -t, p, t) for t in tensors for p in range(1, most + 1))
    least = next(((p, t) for *_, p, t in both if _fits(target, p, t)), None)
    if least is not None:
        return f"use --pipeline-parallel {least[0]} --tensor-parallel {least[1]}"
    return (
        f"no split over up to {most} stages of up to {tensors[-1]} devices fits; use devices with more memory"
    )


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 30):.2f} GiB"


_TYPICAL_CONTEXT = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """The best an engine's devices allow while `batch_size` requests decode and none is in prefill.

    Each request has `context` tokens in the cache and gets a token every `seconds`, which is within the
    budget; all together get `tokens_per_second`. `batch_size` is 0 if even one request exceeds the budget.
    """

    context: int
    batch_size: int
    seconds: float
    tokens_per_second: float


def predicted_capacity(
    model: ModelConfig,
    serving: ServingConfig,
    device: KnownDevice,
    *,
    dtype: Dtype,
    parallel: ParallelConfig,
    context: int | None = None,
    latency_budget: float | None = None,
) -> Capacity:
    """The capacity of an engine of these sizes at the floors of `orca plan`.

    `context` is by default half the model's positions, as in a plan, but at most 1,024. Without
    `latency_budget`, in seconds, only the batch and the slots bound it. Raises ConfigError for a context that
    the model cannot have.
    """
    if context is None:
        context = min(_TYPICAL_CONTEXT, max(1, model.n_positions // 2))
        if model.encoder is not None:
            context = min(context, model.encoder.n_positions)
    target = PlanTarget(
        config=model, device=device, sizes=Sizes(), dtype=dtype, context=context, parallel=parallel
    )
    each = request_slots(model, context, context, block_size=serving.block_size)
    n_fitting = serving.n_slots // (each * parallel.pipeline_parallel)  # a batch for every stage
    most = min(serving.max_batch_size, n_fitting)

    def seconds(batch_size: int) -> float:
        return iteration_floor(target, "decode", batch_size).seconds

    if latency_budget is not None:
        most = bisect_right(range(1, most + 1), latency_budget, key=seconds)  # a larger batch takes longer
    if not most:
        return Capacity(context=context, batch_size=0, seconds=0.0, tokens_per_second=0.0)
    best = iteration_floor(target, "decode", most)
    return Capacity(
        context=context, batch_size=most, seconds=best.seconds, tokens_per_second=best.tokens_per_second
    )
