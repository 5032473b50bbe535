"""Finds the certain part of a continuation: up to a choice that another order of summation could change."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.families.model_config import ModelConfig
from orca_jax.model import reference
from orca_jax.model.sampler import sample
from orca_jax.request.sampling_params import SamplingParams

MARGIN = 1e-4  # of logits: far above what float32 loses in a model of a few layers
_DRAWS = 16
_forward = jax.jit(reference.forward, static_argnums=0)
_draws = jax.jit(jax.vmap(partial(sample, cut=False), in_axes=(0, *[None] * 7)))


@dataclass(frozen=True, slots=True)
class Sure:
    """`n` output tokens are sure; `wrong` is the first of them that differs from the reference's, if any."""

    n: int
    wrong: int | None


def sure_choices(
    config: ModelConfig,
    parameters: reference.Parameters,
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: SamplingParams,
) -> Sure:
    """Whether the choices stay the same if each of the reference's logits is moved by up to MARGIN.

    For a greedy request, or one that samples with temperature and seed alone.
    """
    assert sampling.top_k == 0 and sampling.top_p == 1 and output
    n = len(output)
    ids = np.zeros(config.n_positions, np.int32)  # one length, one program; later tokens change nothing
    ids[: len(prompt) + n] = [*prompt, *output]
    first = len(prompt) - 1
    logits = np.asarray(_forward(config, parameters, jnp.asarray(ids)))[first : first + n]  # [O, V]
    noise = np.random.default_rng(0).uniform(-MARGIN, MARGIN, (_DRAWS, *logits.shape))
    noise[0] = 0.0
    seed = np.uint64(sampling.seed or 0)
    low, high = (
        np.full(n, part).astype(np.uint32).view(np.int32) for part in (seed & 0xFFFFFFFF, seed >> 32)
    )
    zeros = jnp.zeros(n)
    chosen = np.asarray(
        _draws(
            jnp.asarray(logits + noise, jnp.float32),
            jnp.full(n, sampling.temperature, jnp.float32),
            zeros.astype(jnp.int32),
            zeros + 1.0,
            zeros,
            jnp.asarray(low),
            jnp.asarray(high),
            jnp.arange(n, dtype=jnp.int32),
        )
    )  # [_DRAWS, O]
    moved = np.flatnonzero((chosen != chosen[0]).any(axis=0))
    n_sure = int(moved[0]) if len(moved) else n
    wrong = np.flatnonzero(chosen[0, :n_sure] != np.asarray(output)[:n_sure])
    return Sure(n_sure, int(wrong[0]) if len(wrong) else None)
