"""Sizes for servers that only compute prompts, or only decode (docs/separation.md)."""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from orca_jax.errors import ConfigError
from orca_jax.planning.plan import Plan, iteration_floor
from orca_jax.planning.stage_memory import state_bytes

PoolRole = Literal["prefill", "decode"]

_SECONDS = 1.0  # in which a finished prompt is fetched, with the waiting for its turn
_LEAST_PROMPTS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlan:
    """The rates of a server of one role at its floors, with prompts of `context` tokens and `n_output` more.

    It begins or ends `requests_per_second`. A prompt's keys and values, and the recurrent layers' state after
    it, have `prompt_bytes`, and take `transfer_seconds` to another machine. `host_bytes` is advice for
    --kv-host-bytes. A pool needs `others_each` servers of the other role for each of its own.
    """

    role: PoolRole
    context: int
    n_output: int
    max_batch_size: int
    requests_per_second: float
    prompt_bytes: int
    transfer_seconds: float
    host_bytes: int
    others_each: float


def plan_pool(plan: Plan, role: PoolRole, n_output: int) -> PoolPlan:
    """The sizes of a server, beside a pool of the same devices for the other role.

    The batch of decodes is the recommended one, if there is a latency budget. Raises ConfigError for a model
    whose keys and values do not travel.
    """
    target = plan.target
    if target.config.encoder is not None or target.config.is_bidirectional:
        raise ConfigError(
            f"role is {role!r}, and prompts of a model with an encoder do not travel; leave it out"
        )
    if n_output < 1:
        raise ConfigError(f"output_tokens is {n_output}; it must be at least 1")
    best = plan.recommendation
    n_decodes = plan.serving.max_batch_size if best is None else best.max_bs
    slots = plan.serving.n_slots // (plan.target.context + n_output)
    n_decodes = max(1, min(n_decodes, slots // target.parallel.pipeline_parallel))
    decode = iteration_floor(target, "decode", n_decodes)
    decoded = decode.tokens_per_second / n_output
    begun = 1.0 / iteration_floor(target, "prefill", 1).interval
    slot = sum(stage.memory.slot for stage in plan.stages) * target.parallel.tensor_parallel
    keys_and_values = slot * target.context
    each_device = [
        state_bytes(target.model, stage.layers, target.parallel.tensor_parallel, target.itemsize)
        for stage in plan.stages
    ]
    state = sum(each_device) * target.parallel.tensor_parallel
    prompt = keys_and_values + state
    # Up to half of a host tier is for states.
    each = 2 * max(keys_and_values, state) if state else prompt
    rate = begun if role == "prefill" else decoded
    # On the decode side half of the host tier is for blocks that arrive.
    n_prompts = max(_LEAST_PROMPTS, ceil(_SECONDS * rate)) * (1 if role == "prefill" else 2)
    n_devices = target.parallel.tensor_parallel * target.parallel.pipeline_parallel
    return PoolPlan(
        role=role,
        context=target.context,
        n_output=n_output,
        max_batch_size=n_decodes if role == "decode" else plan.serving.max_batch_size,
        requests_per_second=rate,
        prompt_bytes=prompt,
        transfer_seconds=prompt / (target.device.between * n_devices),
        host_bytes=n_prompts * each,
        others_each=begun / decoded if role == "prefill" else decoded / begun,
    )
