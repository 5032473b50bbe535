"""Samples and groups of a rollout, and their form in JSON."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from orca_jax.request.request import FinishReason
from orca_jax.service.output import OutputSoFar

Key = str | int


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A prompt and the L tokens after it: one turn of the model, or several with given tokens in between.

    `key` is its group's.
    `token_ids` [L] int32 are the exact ids, sampled and given ones. `sampled` [L] bool is the mask of a loss:
    True for tokens that the model sampled. `logprobs` [L] float32 are the log-probabilities at which they
    were sampled, by the weights of that time, and 0 for given tokens; None if not requested. `versions` [L]
    int32 are the versions of these weights, and -1 for given tokens.

    `finish_reason` is that of the last turn. `n_cached` counts the input tokens of all turns whose keys and
    values were in the prefix cache. `seed` gives the same sample again, with the same weights.
    """

    key: Key
    prompt_ids: tuple[int, ...]
    token_ids: npt.NDArray[np.int32]
    sampled: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32] | None
    versions: npt.NDArray[np.int32]
    finish_reason: FinishReason
    seed: int
    n_turns: int = 1
    n_cached: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The samples of one prompt, those that ended first in front. `key` is what `Rollout.submit` returned."""

    key: Key
    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]


class Transcript:
    """The tokens after a prompt, as they come."""

    def __init__(self) -> None:
        self.token_ids = list[int]()
        self.sampled = list[bool]()
        self.logprobs = list[float]()
        self.versions = list[int]()
        self.n_turns = 0
        self.n_cached = 0

    def add_turn(self, output: OutputSoFar) -> None:
        """Add the tokens of a turn that has ended."""
        n, versions = len(output.token_ids), output.weights_versions
        self.token_ids += output.token_ids
        self.sampled += [True] * n
        self.logprobs += [token.logprob for token in output.logprobs] or [0.0] * n
        ends = [*(first for first, _ in versions[1:]), n]
        for (first, version), end in zip(versions, ends, strict=True):
            self.versions += [version] * (end - first)
        self.n_turns += 1

    def add_given(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the environment, such as a tool's result."""
        self.token_ids += map(int, token_ids)
        self.sampled += [False] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)
        self.versions += [-1] * len(token_ids)

    def sample(
        self, key: Key, prompt_ids: tuple[int, ...], reason: FinishReason, seed: int, *, with_logprobs: bool
    ) -> Sample:
        """The sample so far."""
        return Sample(
            key=key,
            prompt_ids=prompt_ids,
            token_ids=np.array(self.token_ids, np.int32),
            sampled=np.array(self.sampled, np.bool_),
            logprobs=np.array(self.logprobs, np.float32) if with_logprobs else None,
            versions=np.array(self.versions, np.int32),
            finish_reason=reason,
            seed=seed,
            n_turns=self.n_turns,
            n_cached=self.n_cached,
        )

    def to_json(self) -> dict[str, Any]:
        """Copy the fields; floats keep their bits."""
        return {name: copy.copy(value) for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        made = cls()
        for name in vars(made):
            setattr(made, name, copy.copy(fields[name]))
        return made
