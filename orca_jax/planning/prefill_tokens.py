"""The default of `prefill_tokens`: how many prompt tokens an iteration may add to a batch of decodes."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace

from orca_jax.config import Dtype, ServingConfig
from orca_jax.families.model_config import ModelConfig
from orca_jax.planning.cost_model import Device, IterationShape, floor, operations
from orca_jax.planning.known_devices import CPU, GPUS, gpu_like
from orca_jax.planning.stage_memory import ITEMSIZE, StageRoom

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

    most = serving.max_batch_tokens
    n_fitting = bisect_right(range(1, most + 1), SLOWDOWN * seconds(0), key=seconds)
    return min(max(n_fitting, LEAST), most)
