"""Requests for models whose weights have forms, and what devices hold of them."""

from typing import Any

import jax

from orca_jax.config import ParallelConfig
from orca_jax.families.model_config import ModelConfig
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.sharding.partition import StagePart, split_model


def stages(n_stages: int, tensor: int, model: ModelConfig) -> tuple[StagePart, ...]:
    return split_model(
        model, jax.devices(), ParallelConfig(tensor_parallel=tensor, pipeline_parallel=n_stages)
    )


def requests() -> list[Request]:
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompts = [[5 * i % 90 + 1 for i in range(n)] for n in (1, 19, 33)]
    return [Request(str(n), tuple(ids), len(ids) + 8, sampling, seed=0) for n, ids in enumerate(prompts)]


def device_bytes(arrays: Any) -> int:
    """The bytes on the first device."""
    leaves = jax.tree.leaves(arrays)
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
