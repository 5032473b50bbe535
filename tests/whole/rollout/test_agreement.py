"""The gap between two log-probabilities of the same tokens, against arithmetic by hand."""

from math import log

import numpy as np
import pytest

from orca_jax.errors import ConfigError
from orca_jax.request.request import FinishReason
from orca_jax.rollout import Sample, agreement


def sample(logprobs: list[float] | None, sampled: list[bool]) -> Sample:
    n = len(sampled)
    return Sample(
        key=0,
        prompt_ids=(1,),
        token_ids=np.zeros(n, np.int32),
        sampled=np.array(sampled),
        logprobs=None if logprobs is None else np.array(logprobs, np.float32),
        versions=np.zeros(n, np.int32),
        finish_reason=FinishReason.LENGTH,
        seed=0,
    )


def test_given_tokens_do_not_count() -> None:
    samples = [sample([log(0.5), 0.0, log(0.25)], [True, False, True]), sample([log(0.8)] * 2, [True, True])]
    trained = [[log(0.6), -9.0, log(0.25)], [log(0.8), log(0.4)]]  # ratios 1.2, 1, 1 and a half
    found = agreement(samples, trained, clip=0.25)
    assert found.n_tokens == 4
    assert found.mean == pytest.approx((log(1.2) + log(2)) / 4, rel=1e-6)
    assert found.largest == pytest.approx(log(2), rel=1e-6)
    assert found.kl == pytest.approx((0.2 - log(1.2) + -0.5 + log(2)) / 4, rel=1e-6)
    assert found.outside == 0.25 and agreement(samples, trained, clip=0.1).outside == 0.5


def test_what_cannot_be_compared_is_named() -> None:
    one = sample([0.0], [True])
    for samples, trained, said in (
        ([one], [], "logprobs of 0 samples for 1"),
        ([sample(None, [True])], [[0.0]], "sample 0 has no log-probabilities; sample with logprobs=0"),
        ([one, one], [[0.0], [0.0, 1.0]], r"sample 1 has 1 tokens, and its logprobs the shape \(2,\)"),
        ([sample([0.0], [False])], [[0.0]], "no sampled token"),
    ):
        with pytest.raises(ConfigError, match=said):
            agreement(samples, trained)
