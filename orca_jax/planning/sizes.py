"""The sizes of an engine: the user's, and defaults that follow from the model and the memory."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from orca_jax.config import ORCA, Dtype, SchedulingConfig, ServingConfig, Sizes
from orca_jax.errors import ConfigError
from orca_jax.families.model_config import ModelConfig
from orca_jax.iteration.shape import EngineShape, serving_buckets
from orca_jax.planning.cost_model import Device, IterationShape, floor, operations
from orca_jax.planning.known_devices import CPU, GPUS, gpu_like
from orca_jax.planning.stage_memory import ITEMSIZE, StageRoom
from orca_jax.scheduling.blocks import round_up
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.snapshots import least_blocks

# Tokens of an iteration by default where prompts come in chunks: enough to use a GPU's arithmetic, and few
# enough that the temporaries of models with long contexts leave memory for keys and values.
CHUNKED_TOKENS = 8192
# By default, snapshots of recurrent layers' states for each place of a batch, and their most of the memory.
_SNAPSHOTS_EACH, _SNAPSHOT_SHARE = 8, 0.25


def serving_config(
    config: ModelConfig,
    requested: Sizes,
    rooms: Sequence[StageRoom],
    *,
    coarse_buckets: bool = False,
    device: str | None = None,
) -> ServingConfig:
    """Fill in the sizes that the user did not give, and check the others against the model.

    `n_slots` is the largest that fits, as ORCA 4.2 advises. A slot takes memory on every stage, so the stage
    with the least room decides (`rooms` has one entry per stage). `n_slots` is at most what all admitted
    requests can reserve, or, if the engine shares its memory with others, a full batch of the longest
    requests. Models with an encoder have no prefix cache, because the decoder's keys and values depend on the
    encoder's input. Models with recurrent layers have one as far as there is memory for snapshots of their
    states. `coarse_buckets` are for GPUs (iteration/shape.py). The default of `prefill_tokens`
    follows from `device`, the name of the stages' devices; without it that setting stays as given. Raises
    ConfigError.
    """
    if config.is_bidirectional:
        requested = _whole_prompts(requested)
    if config.encoder is not None:
        if requested.prefix_caching:
            raise ConfigError(
                "prefix_caching is on, and the model has an encoder: what its decoder keeps depends on the "
                "encoder's input, so that a prompt's beginning can never be reused; leave it out"
            )
        if requested.kv_host_bytes:
            raise _no_host_tier(requested, "the model has an encoder, and so no prefix cache; leave it out")
        requested = replace(requested, prefix_caching=False)
    if requested.speculates and (config.encoder is not None or config.only_pools):
        generates_nothing = config.only_pools and not config.is_bidirectional
        part = "that generates nothing" if generates_nothing else "with an encoder"
        raise ConfigError(
            f"speculative is {requested.speculative!r}, which does not work yet with a model {part}; "
            "leave it out"
        )
    longest = config.n_positions
    longest_read = 0 if config.encoder is None else config.encoder.n_positions
    whole_request = request_slots(config, longest, longest_read, block_size=requested.block_size)
    sizes = requested.filled(n_slots=whole_request, max_batch_tokens=batch_tokens(config, requested))
    if sizes.max_batch_tokens < longest and not sizes.scheduling.chunked_prefill:
        raise ConfigError(
            f"max_batch_tokens is {sizes.max_batch_tokens}; without chunked_prefill it must be at least the "
            f"model's {longest} positions, so that the longest prompt fits into one iteration"
        )
    n_draft_states = 0
    if config.has_state and sizes.scheduling.speculates:
        n_draft_states = len(rooms) * draft_states(sizes)
        sizes = replace(sizes, n_draft_states=n_draft_states)
    n_snapshots = 0
    if config.has_state and sizes.scheduling.prefix_caching:
        n_snapshots = _n_snapshots(
            config, requested, sizes, rooms, max(whole_request, requested.n_slots or 0)
        )
        if not n_snapshots:  # a cached block has keys and values, but not the state after its last token
            if requested.kv_host_bytes:
                raise _no_host_tier(
                    requested,
                    "the model has recurrent layers, of whose states no snapshot fits on the devices; leave "
                    "it out, or raise snapshot_bytes",
                )
            requested = replace(requested, prefix_caching=False)
    sizes = replace(sizes, n_snapshots=n_snapshots)
    shape = engine_shape(config, sizes, n_workers=len(rooms))
    fitting = [room.slots(room.memory(config, shape)) for room in rooms]
    modest = any(room.modest is not None for room in rooms)
    n_requests = shape.max_rows if modest else shape.n_rows
    tier = _host_tier(config, requested, shape, rooms)
    serving = requested.filled(
        n_slots=max(whole_request, min(n_requests * whole_request, *fitting)),
        max_batch_tokens=sizes.max_batch_tokens,
        coarse_buckets=coarse_buckets,
        n_snapshots=n_snapshots,
        n_draft_states=n_draft_states,
        n_host_blocks=tier.n_blocks,
        host_block_bytes=tier.block_bytes,
        n_host_states=tier.n_states,
        host_state_bytes=tier.state_bytes,
    )
    if device is None:
        return serving
    if serving.scheduling.speculates:
        costs = iteration_costs(serving, config, rooms, device=device)
        serving = replace(serving, iteration_costs=costs)
    return with_prefill_tokens(serving, config, rooms, device=device)


def _whole_prompts(requested: Sizes) -> Sizes:
    """The sizes for a model whose tokens see later ones: prompts are neither cut nor cached. ConfigError."""
    for name in ("chunked_prefill", "prefix_caching", "kv_host_bytes"):
        if getattr(requested, name):
            raise ConfigError(
                f"{name} is {getattr(requested, name)}, and the tokens of this model see later ones, so that "
                "a prompt runs whole and nothing of it can be reused; leave it out"
            )
    return replace(requested, chunked_prefill=False, prefix_caching=False)


def _n_snapshots(
    config: ModelConfig, requested: Sizes, sizes: ServingConfig, rooms: Sequence[StageRoom], needed: int
) -> int:
    """The snapshots of recurrent layers' states that fit on every stage's devices.

    By default they take a part of the memory for keys and values, of which `needed` slots must remain. Raises
    ConfigError where a prefix cache is asked for and no snapshot fits.
    """
    shape = engine_shape(config, sizes, n_workers=len(rooms))
    asked, n = requested.snapshot_bytes, _SNAPSHOTS_EACH * sizes.max_batch_size
    fitting: list[int] = []
    for room in rooms:
        memory = room.memory(config, shape)
        each, budget = memory.states // shape.n_rows, room.budget(memory)
        if each:
            most = min(int(_SNAPSHOT_SHARE * budget), budget - needed * memory.slot)
            fitting.append(max(0, most if asked is None else asked) // each)
    found = min(fitting if asked is not None else [n, *fitting])
    if requested.prefix_caching and not found:
        why = "no memory is left for them" if asked is None else f"snapshot_bytes {asked} holds none"
        raise ConfigError(
            "prefix_caching is on, and the model has recurrent layers: a cached block is of use only with a "
            f"snapshot of their states, and {why}; leave it out, or raise snapshot_bytes"
        )
    return found


class _HostTier(NamedTuple):
    """The blocks and states that the host's memory has room for, and the bytes of each over all stages."""

    n_blocks: int = 0
    block_bytes: int = 0
    n_states: int = 0
    state_bytes: int = 0


def _host_tier(
    config: ModelConfig, requested: Sizes, shape: EngineShape, rooms: Sequence[StageRoom]
) -> _HostTier:
    """The blocks of all stages' keys and values that fit in `kv_host_bytes`, and the states.

    States take up to half of it, and no more than there are between as many blocks. Raises ConfigError.
    """
    n_bytes = requested.kv_host_bytes
    if not n_bytes:
        return _HostTier()
    memories = [room.memory(config, shape) for room in rooms]
    slot = sum(memory.slot * room.n_devices for memory, room in zip(memories, rooms, strict=True))
    each, state, n_states = requested.block_size * slot, 0, 0
    if config.has_state:
        states = (memory.states * room.n_devices for memory, room in zip(memories, rooms, strict=True))
        state = sum(states) // shape.n_rows
        n_between = least_blocks(requested.scheduling.snapshot_blocks)
        n_states = min(n_bytes // 2 // state, max(1, n_bytes // (state + n_between * each)))
    n = (n_bytes - n_states * state) // each
    if not n or (config.has_state and not n_states):
        why = f"one block of keys and values takes {each} bytes"
        why += f", and a recurrent state {state}, which may take half of it" if config.has_state else ""
        raise _no_host_tier(
            requested, f"{why}; give room for as many as a conversation needs, or leave it out"
        )
    return _HostTier(n, each, n_states, state)


def _no_host_tier(requested: Sizes, why: str) -> ConfigError:
    return ConfigError(f"kv_host_bytes is {requested.kv_host_bytes}, and {why}")


def batch_tokens(config: ModelConfig, requested: Sizes) -> int:
    """The maximum number of tokens of an iteration: as asked, or enough for what must run in one."""
    if requested.max_batch_tokens is not None:
        return requested.max_batch_tokens
    longest_read = 0 if config.encoder is None else config.encoder.n_positions
    # Without chunks the encoder and, after a loss, all of the decoder's tokens run in one iteration.
    chunked = requested.scheduling.chunked_prefill
    read = longest_read and longest_read + (1 if chunked else config.n_positions)
    prompt = min(config.n_positions, CHUNKED_TOKENS) if chunked else config.n_positions
    return max(2048, prompt, read, requested.max_batch_size)


def request_slots(config: ModelConfig, n_tokens: int, n_read: int, *, block_size: int) -> int:
    """The slots, in whole blocks, of a request of `n_tokens` and with an encoder `n_read` tokens."""
    return round_up(n_tokens, block_size) + (round_up(n_read, block_size) if config.encoder else 0)


def draft_states(serving: ServingConfig) -> int:
    """The drafts of a batch whose states can be kept, for a model with recurrent layers.

    A draft takes a place of the batch. Where drafts would take more than half of it there are few requests,
    so only one of these may have as many drafts as it can.
    """
    most = serving.max_batch_size
    return max(min(serving.scheduling.speculative_tokens, most - 1), most // 2)


def n_rows(max_batch_size: int, *, n_workers: int) -> int:
    """The most admitted requests at a time: one batch per worker, and one in preparation."""
    return (n_workers + 1) * max_batch_size


def engine_shape(model: ModelConfig, serving: ServingConfig, *, n_workers: int) -> EngineShape:
    """The shape of an engine that serves this model, with one batch in flight per worker."""
    sparse_layers, top_k, n_experts = model.expert_routing
    keeps_states = model.has_state and serving.scheduling.speculates
    n_draft_states = serving.n_draft_states if keeps_states else 0
    return EngineShape(
        block_size=serving.block_size,
        max_blocks=-(-model.n_positions // serving.block_size),
        max_rows=serving.max_batch_size,
        max_tokens=serving.max_batch_tokens,
        n_rows=n_rows(serving.max_batch_size, n_workers=n_workers),
        n_blocks=serving.n_blocks,
        vocab_size=model.vocab_size,
        deterministic=serving.deterministic,
        coarse_buckets=serving.coarse_buckets,
        max_encoder_blocks=-(-longest_input(model, serving) // serving.block_size),
        embedding_size=model.pooled_size if model.encoder is None else 0,
        sparse_layers=sparse_layers,
        top_k=top_k,
        n_experts=n_experts,
        states=model.has_state,
        n_snapshots=serving.n_snapshots if model.has_state else 0,
        n_draft_states=n_draft_states,
        max_drafts=serving.scheduling.speculative_tokens if n_draft_states else 0,
        n_host_blocks=serving.n_host_blocks,
        n_host_states=serving.n_host_states if model.has_state else 0,
        drafts=serving.scheduling.speculates,
        max_adapters=serving.max_loras,
        adapter_rank=serving.max_lora_rank if serving.max_loras else 0,
        **{f"adapted_{extra}": True for extra in serving.lora_extras if serving.max_loras},
    )


def longest_input(model: ModelConfig, serving: ServingConfig) -> int:
    """The most tokens of an encoder's input, which one iteration reads whole; 0 without an encoder."""
    if model.encoder is None:
        return 0
    # Beside the decoder's first token.
    return max(1, min(model.encoder.n_positions, serving.max_batch_tokens - 1))


def kv_manager(shape: EngineShape, scheduling: SchedulingConfig = ORCA) -> KVManager:
    """A K/V manager for an engine of this shape. Without snapshots a hybrid has no prefix cache."""
    return KVManager(
        n_blocks=shape.n_blocks,
        block_size=shape.block_size,
        n_rows=shape.n_rows,
        max_blocks_per_row=shape.max_blocks,
        max_encoder_blocks=shape.max_encoder_blocks,
        prefix_caching=scheduling.prefix_caching and (not shape.states or shape.n_snapshots > 0),
        n_snapshots=shape.n_snapshots if scheduling.prefix_caching else 0,
        n_draft_states=shape.n_draft_states,
        snapshot_blocks=scheduling.snapshot_blocks,
        n_host_blocks=shape.n_host_blocks if scheduling.prefix_caching else 0,
        n_host_states=shape.n_host_states if scheduling.prefix_caching else 0,
    )


SLOWDOWN = 2.0  # of an iteration that carries prompt tokens, over the same decodes alone
LEAST = 64  # prompts must advance even if decodes are fast
# On a CPU arithmetic takes all the time, so smaller chunks only delay: on the paper's trace, 64 gave 15 %
# less throughput than 512, and 256 a median time to the first token 1.3 times as long.
ON_A_CPU = 512
_CONTEXT = 128  # tokens of each decoding request: young requests, so that decodes alone are fast
_DEPTH = 8192  # tokens of the prompt before the chunk: attention makes late chunks of long prompts slower
_DTYPE: Mapping[int, Dtype] = {ITEMSIZE[dtype]: dtype for dtype in ("float32", "bfloat16")}  # by size


def nominal_rates(device: str, itemsize: int) -> Device:
    """Rates of the GPU with this name, such as "h200" or "NVIDIA H100 80GB HBM3".

    An unknown one counts as an H100. `itemsize` is of the weights, in bytes an element.
    """
    return (gpu_like(device) or GPUS["h100"]).rates(_DTYPE[itemsize])


def with_prefill_tokens(
    serving: ServingConfig, model: ModelConfig, rooms: Sequence[StageRoom], *, device: str
) -> ServingConfig:
    """`serving` with the default of `prefill_tokens` if it has none and prompts come in chunks."""
    scheduling = serving.scheduling
    if not scheduling.chunked_prefill or scheduling.prefill_tokens is not None:
        return serving
    if device.lower() == CPU:
        n_tokens = min(ON_A_CPU, serving.max_batch_tokens)
    else:
        split = model.for_devices(rooms[0].n_devices)
        n_tokens = default_prefill_tokens(serving, split, rooms, nominal_rates(device, rooms[0].itemsize))
    return replace(serving, scheduling=replace(scheduling, prefill_tokens=n_tokens))


# On a CPU a token more takes a seventh of the time of an iteration with one: measured for 12 layers of 768 in
# float32 with AVX2, iterations of 8 tokens took twice as long, and of 32 tokens 5.6 times (bench/LOG.md).
TOKENS_OF_AN_ITERATION = 6.0
_DRAFTED_CONTEXT = 1024  # tokens before a drafted one


def iteration_costs(
    serving: ServingConfig, model: ModelConfig, rooms: Sequence[StageRoom], *, device: str
) -> tuple[float, ...]:
    """The time of an iteration of each bucket: on a CPU relative to a token's, else the floor in seconds."""
    buckets = serving_buckets(serving)
    if device.lower() == CPU:
        return tuple(TOKENS_OF_AN_ITERATION + n_tokens for n_tokens in buckets)
    split, rates = model.for_devices(rooms[0].n_devices), nominal_rates(device, rooms[0].itemsize)
    context = min(_DRAFTED_CONTEXT, model.n_positions)
    return tuple(
        seconds_at_least(IterationShape([1] * n, [context] * n), split, rooms, rates) for n in buckets
    )


def default_prefill_tokens(
    serving: ServingConfig, model: ModelConfig, rooms: Sequence[StageRoom], rates: Device
) -> int:
    """The most prompt tokens with which a full batch of decodes takes at most twice its time alone.

    Decode reads all weights for a few tokens, so up to some number prompt tokens cost little; from there on
    they cost arithmetic (Sarathi-Serve, section 4.3). The times are floors of the cost model, for decodes of
    short requests and a late chunk of a long prompt, so that other mixes are slowed down less. The result is
    at least LEAST and at most `max_batch_tokens`.
    """
    n_decodes = serving.max_batch_size
    context = min(_CONTEXT, model.n_positions)
    depth = min(_DEPTH, model.n_positions)

    def seconds(n_tokens: int) -> float:
        prompt = [n_tokens] if n_tokens else []
        shape = IterationShape([1] * n_decodes + prompt, [context] * n_decodes + [depth + n for n in prompt])
        return seconds_at_least(shape, model, rooms, rates)

    most = serving.max_batch_tokens
    n_fitting = bisect_right(range(1, most + 1), SLOWDOWN * seconds(0), key=seconds)
    return min(max(n_fitting, LEAST), most)


def seconds_at_least(
    shape: IterationShape, model: ModelConfig, rooms: Sequence[StageRoom], rates: Device
) -> float:
    """The floor of an iteration's time, all stages together."""
    return sum(
        floor(
            operations(
                model,
                shape,
                weight_bytes=room.itemsize,
                kv_bytes=room.itemsize,
                layers=room.layers,
                n_shards=room.n_devices,
            ),
            rates,
        )
        for room in rooms
    )
