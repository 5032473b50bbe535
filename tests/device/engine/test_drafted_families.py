"""Speculation on real families' engines: drawn requests, policies and drafters change no result."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import ORCA, SchedulingConfig, ServingConfig
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.execution.worker import LocalWorkers, Worker
from orca_jax.families.model_config import ModelConfig
from orca_jax.iteration.rows.drafted import Drafted
from orca_jax.request.request import PLAIN, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.speculation.drafter import Speculation, configured_speculation
from tests.device.engine.planned_requests import assert_same_logprobs
from tests.device.harness import harness
from tests.device.model.golden import load_golden

SERVING = ServingConfig(max_batch_size=8, n_slots=160, max_batch_tokens=64, block_size=4)
BUCKETS = (8, 64)  # a deterministic engine's too
N_TOKENS = 4  # drafts
END = frozenset({1})


@cache
def family(name: str, deterministic: bool) -> tuple[ModelConfig, Sequence[Worker]]:
    checkpoint = load_checkpoint(load_golden(name).directory, dtype=jnp.float32)
    model = checkpoint.config
    serving = replace(SERVING, deterministic=deterministic, scheduling=ORCA)
    engine = harness(model, checkpoint.parameters, serving, buckets=BUCKETS).scheduler.engine
    assert isinstance(engine, EngineMaster)
    assert isinstance(engine._workers, LocalWorkers)
    return model, engine._workers.workers


@dataclass(frozen=True)
class Asked:
    arrival: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int


class Told:
    """Drafts the output that came without speculation, each token wrong with a probability."""

    def __init__(self, output_ids: Sequence[int], wrong: float) -> None:
        self._output_ids = output_ids
        self._wrong = wrong
        self._random = random.Random(len(output_ids))

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        right = self._output_ids[len(output_ids) :][:n]
        return [token_id ^ (self._random.random() < self._wrong) for token_id in right]


def play(
    name: str, asked: Sequence[Asked], serving: ServingConfig, each: Sequence[Speculation | None]
) -> list[Request]:
    model, workers = family(name, serving.deterministic)
    ran = harness(model, {}, serving, buckets=BUCKETS, workers=workers)
    requests = [
        Request(
            str(i),
            one.prompt,
            len(one.prompt) + one.sampling.max_tokens,
            one.sampling,
            seed=i,
            end_token_ids=END,
            kind=PLAIN if speculation is None else Drafted(speculation),
            priority=one.priority,
        )
        for i, (one, speculation) in enumerate(zip(asked, each, strict=True))
    ]
    ran.run(requests, [one.arrival for one in asked])
    return requests


def drawn_requests() -> st.SearchStrategy[list[Asked]]:
    # Few tokens, so that prompts have the same n-grams as outputs, and begin alike.
    prompt = st.lists(st.integers(2, 4), min_size=1, max_size=30).map(tuple)
    sampling = st.builds(
        SamplingParams,
        max_tokens=st.integers(8, 24),
        temperature=st.sampled_from([0.0, 0.0, 0.9]),
        top_p=st.just(0.8),  # others would need more programs
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
        logprobs=st.integers(0, 2),
    )
    asked = st.builds(
        Asked, arrival=st.integers(0, 6), prompt=prompt, sampling=sampling, priority=st.integers(0, 1)
    )
    return st.lists(asked, min_size=2, max_size=5)


policies = st.builds(
    SchedulingConfig,
    chunked_prefill=st.booleans(),
    prefix_caching=st.booleans(),
    reservation=st.sampled_from(["full", "on-demand"]),
    scheduling_policy=st.sampled_from(["fcfs", "priority"]),
)


@pytest.mark.parametrize(
    "n_examples", [6, pytest.param(150, marks=[pytest.mark.long, pytest.mark.timeout(1200)])]
)
@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    "name",
    [
        "mistral-window",
        pytest.param("gemma2-caps", marks=pytest.mark.matrix),
        pytest.param("deepseek-v3-groups-yarn-dense-first", marks=pytest.mark.matrix),
    ],
)
def test_results_are_those_without_speculation(name: str, deterministic: bool, n_examples: int) -> None:
    seen = Counter[str]()

    @settings(
        max_examples=n_examples,
        deadline=None,
        derandomize=n_examples < 100,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(
        asked=drawn_requests(),
        policy=policies,
        drafter=st.sampled_from(["told", "suffix", "ngram"]),
        wrong=st.sampled_from([0.2, 0.0, 1.0]),
    )
    def results_are_equal(asked: list[Asked], policy: SchedulingConfig, drafter: str, wrong: float) -> None:
        if deterministic:
            policy = replace(policy, chunked_prefill=False, prefix_caching=False, reservation="full")
        plain = replace(SERVING, deterministic=deterministic, scheduling=ORCA)
        expected = play(name, asked, plain, [None] * len(asked))
        size, speculative = (
            family(name, deterministic)[0].vocab_size,
            "ngram" if drafter == "told" else drafter,
        )
        policy = replace(policy, speculative=speculative, speculative_tokens=N_TOKENS)
        made = configured_speculation(policy, vocab_size=size)
        assert made is not None
        each = [made] * len(asked)
        if drafter == "told":
            outputs = [req.output_ids for req in expected]
            each = [
                Speculation(lambda *_, known=known: Told(known, wrong), N_TOKENS, size) for known in outputs
            ]
        drafting = replace(plain, scheduling=policy)
        for ours, theirs in zip(play(name, asked, drafting, each), expected, strict=True):
            assert (ours.output_ids, ours.finish_reason) == (theirs.output_ids, theirs.finish_reason)
            assert_same_logprobs(ours.logprobs, theirs.logprobs, atol=0.0 if deterministic else 1e-5)
        for speculation in {id(one): one for one in each}.values():
            seen["accepted"] += speculation.n_accepted
            seen["rejected"] += speculation.n_drafted - speculation.n_accepted

    results_are_equal()
    assert seen["accepted"] >= 5 and seen["rejected"] >= 5, seen
