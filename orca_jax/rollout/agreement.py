"""The gap between the engine's and a trainer's log-probabilities of the same samples."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orca_jax.errors import ConfigError
from orca_jax.rollout.sample import Sample


@dataclass(frozen=True, slots=True)
class Agreement:
    """The distance between two log-probabilities of each sampled token.

    `mean` and `largest` are of the absolute differences. `kl` estimates the divergence of the trainer's
    distribution from the one that was sampled, in nats per token: the mean of r - 1 - log r over the ratios
    r, which is never negative. `outside` is the share of tokens whose ratio is outside 1 - clip to 1 + clip,
    which a clipped loss would cut off before the first step.
    """

    n_tokens: int
    mean: float
    largest: float
    kl: float
    outside: float


def agreement(
    samples: Sequence[Sample], logprobs: Sequence[npt.ArrayLike], *, clip: float = 0.2
) -> Agreement:
    """Compare each sample's log-probabilities with the trainer's for its L tokens, given or sampled.

    Only sampled tokens count. Raises ConfigError for samples without log-probabilities, for another number of
    them, and for none.
    """
    if len(samples) != len(logprobs):
        raise ConfigError(
            f"there are logprobs of {len(logprobs)} samples for {len(samples)}; give one for each"
        )
    differences = list[npt.NDArray[np.float64]]()
    for i, (sample, given) in enumerate(zip(samples, logprobs, strict=True)):
        trained = np.asarray(given, np.float64)
        if sample.logprobs is None:
            raise ConfigError(f"sample {i} has no log-probabilities; sample with logprobs=0")
        if trained.shape != sample.logprobs.shape:
            raise ConfigError(
                f"sample {i} has {len(sample.token_ids)} tokens, and its logprobs the shape {trained.shape}"
            )
        differences.append((trained - sample.logprobs)[sample.sampled])
    every = np.concatenate([*differences, np.zeros(0)])
    if not len(every):
        raise ConfigError("there is no sampled token to compare")
    return gap(every, clip)


def gap(differences: npt.NDArray[np.float64], clip: float) -> Agreement:
    """The agreement of tokens with these differences [n] of log-probabilities, the trainer's less ours."""
    ratio = np.exp(differences)
    return Agreement(
        n_tokens=len(differences),
        mean=float(np.abs(differences).mean()),
        largest=float(np.abs(differences).max()),
        kl=float((ratio - 1 - differences).mean()),
        outside=float((np.abs(ratio - 1) > clip).mean()),
    )
