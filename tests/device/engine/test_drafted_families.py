"""Speculation on real families' engines: drawn requests, policies and drafters change no result."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import ORCA, SchedulingConfig, ServingConfig
from orca_jax.engine.draft_engine import DraftEngine
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.execution.worker import LocalWorkers, Worker
from orca_jax.families.model_config import ModelConfig
from orca_jax.iteration.rows.drafted import Drafted
from orca_jax.iteration.shape import serving_buckets
from orca_jax.launch.local_engine import build_engine
from orca_jax.planning.draft_model import draft_serving
from orca_jax.request.request import PLAIN, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.sharding.partition import split_model
from orca_jax.speculation.drafter import Speculation, configured_speculation
from tests.device.engine.planned_requests import assert_same_logprobs, drawn_policies
from tests.device.harness import harness, place
from tests.device.model.golden import DIRECTORY, NAMES, load_golden

SERVING = ServingConfig(max_batch_size=8, n_slots=160, max_batch_tokens=64, block_size=4)
BUCKETS = (8, 64)  # a deterministic engine's too
N_TOKENS = 4  # drafts
DRAFT_SIZES = replace(draft_serving(SERVING, n_slots=160, prefix_caching=True), max_batch_tokens=16)
DRAFT_BUCKETS = (8, 16)
END = frozenset({1})
ONE_PHASE = SchedulingConfig(chunked_prefill=False, prefix_caching=False, reservation="full")


def sized(model: ModelConfig) -> ServingConfig:
    """The sizes of an engine, of a hybrid with few snapshots of states."""
    if not model.has_state:
        return SERVING
    return replace(SERVING, n_snapshots=5, n_draft_states=4)


def loaded(name: str, deterministic: bool) -> tuple[ModelConfig, Sequence[Worker]]:
    checkpoint = load_checkpoint(load_golden(name).directory, dtype=jnp.float32)
    model = checkpoint.config
    scheduling = replace(ONE_PHASE, speculative="ngram", speculative_tokens=N_TOKENS)
    serving = replace(sized(model), deterministic=deterministic, scheduling=scheduling)
    engine = harness(model, checkpoint.parameters, serving, buckets=BUCKETS).scheduler.engine
    assert isinstance(engine, EngineMaster)
    assert isinstance(engine._workers, LocalWorkers)
    return model, engine._workers.workers


family = cache(loaded)


@cache
def draft_workers(name: str) -> Sequence[Worker]:
    """The worker of a draft model: the served model with noise in its weights, for some wrong drafts."""
    checkpoint = load_checkpoint(load_golden(name).directory, dtype=jnp.float32)
    model, (part,) = checkpoint.config, split_model(checkpoint.config, jax.devices()[:1])
    rng = np.random.default_rng(0)
    noisy = {
        key: value + 0.1 * jnp.std(value) * rng.standard_normal(value.shape, np.float32)
        for key, value in checkpoint.parameters.items()
    }
    stages = place(model, noisy, [part])
    return build_engine(model, stages, DRAFT_SIZES, [part], buckets=DRAFT_BUCKETS).workers.workers


def draft_model(name: str) -> DraftEngine:
    """Make a draft model's engine with an empty cache."""
    model, workers = family(name, deterministic=False)[0], draft_workers(name)
    parts = split_model(model, jax.devices()[:1])
    built = build_engine(model, [], DRAFT_SIZES, parts, buckets=DRAFT_BUCKETS, workers=workers)
    costs = [0.0] * len(serving_buckets(DRAFT_SIZES))
    return DraftEngine(built.engine, built.kv, model=model, config=DRAFT_SIZES, costs=costs)


@dataclass(frozen=True)
class Asked:
    arrival: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int


# An example with right and wrong drafts, whatever else is drawn, and a policy that suits every engine.
CROWD = [
    Asked(i, (2, 3, 4) * (i + 1), SamplingParams(max_tokens=24, temperature=0.9, top_p=0.8, logprobs=1), 0)
    for i in range(4)
]


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
    engine: tuple[ModelConfig, Sequence[Worker]],
    asked: Sequence[Asked],
    serving: ServingConfig,
    each: Sequence[Speculation | None],
) -> list[Request]:
    model, workers = engine
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
            owner=f"client {i % 2}",
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


@pytest.mark.parametrize(
    "n_examples", [6, pytest.param(150, marks=[pytest.mark.long, pytest.mark.timeout(1200)])]
)
@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    "name",
    [
        "mistral-window",
        "lfm2-recurrent-last",
        pytest.param("qwen3-next-grouped", marks=pytest.mark.matrix),
        pytest.param("falcon-h1-multipliers", marks=pytest.mark.matrix),
        pytest.param("gemma2-caps", marks=pytest.mark.matrix),
        pytest.param("deepseek-v3-groups-yarn-dense-first", marks=pytest.mark.matrix),
    ],
)
def test_results_are_those_without_speculation(name: str, deterministic: bool, n_examples: int) -> None:
    seen = Counter[str]()
    is_hybrid = family(name, deterministic)[0].has_state  # which no draft model may be
    all_drafters = n_examples > 100 and not is_hybrid

    @settings(
        max_examples=n_examples,
        deadline=None,
        derandomize=n_examples <= 100,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @example(asked=CROWD, policy=ONE_PHASE, drafter="told", wrong=0.2)
    @given(
        asked=drawn_requests(),
        policy=drawn_policies(deterministic=deterministic),
        drafter=st.sampled_from(["told", "suffix", "ngram", *["model"] * all_drafters]),
        wrong=st.sampled_from([0.2, 0.0, 1.0]),
    )
    def results_are_equal(asked: list[Asked], policy: SchedulingConfig, drafter: str, wrong: float) -> None:
        engine = family(name, deterministic)
        plain = replace(sized(engine[0]), deterministic=deterministic, scheduling=ORCA)
        expected = play(engine, asked, plain, [None] * len(asked))
        size = engine[0].vocab_size
        speculative = "suffix" if drafter == "suffix" else "ngram"
        policy = replace(
            policy,
            speculative=speculative,
            speculative_tokens=N_TOKENS,
            snapshot_blocks=1 if is_hybrid else 64,
        )
        made = configured_speculation(policy, vocab_size=size)
        assert made is not None
        each = [made] * len(asked)
        if drafter == "told":
            outputs = [req.output_ids for req in expected]
            each = [
                Speculation(lambda *_, known=known: Told(known, wrong), N_TOKENS, size) for known in outputs
            ]
        shared = draft_model(name) if drafter == "model" else None
        if shared is not None:
            each = [Speculation(lambda *_: Told((), 0.0), N_TOKENS, size, shared=shared)] * len(asked)
        drafting = replace(plain, scheduling=policy)
        for ours, theirs in zip(play(engine, asked, drafting, each), expected, strict=True):
            assert (ours.output_ids, ours.finish_reason) == (theirs.output_ids, theirs.finish_reason)
            assert_same_logprobs(ours.logprobs, theirs.logprobs, atol=0.0 if deterministic else 1e-5)
        assert shared is None or not shared.failed
        for speculation in {id(one): one for one in each}.values():
            if speculation.shared is not None:
                seen["a model's accepted"] += speculation.n_accepted
                seen["a model's rejected"] += speculation.n_drafted - speculation.n_accepted
            seen["accepted"] += speculation.n_accepted
            seen["rejected"] += speculation.n_drafted - speculation.n_accepted

    results_are_equal()
    assert seen["accepted"] >= 5 and seen["rejected"] >= 5, seen
    assert not all_drafters or min(seen["a model's accepted"], seen["a model's rejected"]) >= 5, seen


def family_of(name: str) -> str:
    return json.loads((DIRECTORY / name / "config.json").read_text())["model_type"]


# One model of each family; the others are long.
FIRST = {family_of(name): name for name in reversed(NAMES)}
MIXED = [
    Asked(0, (2, 3, 4, 2, 3), SamplingParams(max_tokens=16, temperature=0.0, logprobs=2), 0),
    Asked(0, (2, 3, 4, 2, 3, 4, 5), SamplingParams(max_tokens=16, temperature=0.9, top_p=0.8, logprobs=1), 0),
    Asked(2, (7,), SamplingParams(max_tokens=16, temperature=0.0, repetition_penalty=1.4, logprobs=0), 0),
    Asked(3, (2, 3, 4, 2, 9, 9), SamplingParams(max_tokens=16, temperature=0.9, top_p=0.8), 0),
]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FIRST.values() else pytest.mark.long) for name in NAMES],
)
def test_right_and_wrong_drafts_change_no_result_of_a_family(name: str) -> None:
    engine = model, _ = loaded(name, deterministic=False)
    policy = SchedulingConfig(speculative="ngram", speculative_tokens=N_TOKENS, snapshot_blocks=1)
    plain = replace(sized(model), scheduling=ORCA)
    expected = play(engine, MIXED, plain, [None] * len(MIXED))
    each = [
        Speculation(lambda *_, known=req.output_ids: Told(known, 0.3), N_TOKENS, model.vocab_size)
        for req in expected
    ]
    for ours, theirs in zip(
        play(engine, MIXED, replace(plain, scheduling=policy), each), expected, strict=True
    ):
        assert (ours.output_ids, ours.finish_reason) == (theirs.output_ids, theirs.finish_reason)
        assert_same_logprobs(ours.logprobs, theirs.logprobs, atol=1e-5)
    n_drafted, n_accepted = (sum(one.n_drafted for one in each), sum(one.n_accepted for one in each))
    assert n_accepted >= 5 and n_drafted - n_accepted >= 2, (n_drafted, n_accepted)
