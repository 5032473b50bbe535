"""The most tokens per second that a running engine could generate, for autoscalers."""

from bisect import bisect_right
from dataclasses import dataclass

from orca_jax.config import Dtype, ParallelConfig, ServingConfig, Sizes
from orca_jax.families.model_config import ModelConfig
from orca_jax.planning.known_devices import KnownDevice
from orca_jax.planning.plan import PlanTarget, iteration_floor
from orca_jax.planning.sizes import request_slots

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
