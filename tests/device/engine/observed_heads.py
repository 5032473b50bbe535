"""Engines with a head that drafts: what it computes in each round, and the results with it and without."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from orca_jax import LLM, SamplingParams
from orca_jax.config import ORCA, SchedulingConfig, ServingConfig
from orca_jax.engine.draft_engine import DraftEngine, ServedCache
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.execution.worker import LocalWorkers
from orca_jax.families.model_config import ModelConfig
from orca_jax.iteration.rows import drafted
from orca_jax.iteration.rows.drafted import Drafted
from orca_jax.iteration.shape import serving_buckets
from orca_jax.launch import local_draft
from orca_jax.launch.local_engine import build_engine
from orca_jax.model import reference
from orca_jax.request.request import PLAIN, Request
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.service.generation import GenerationResult
from orca_jax.sharding.partition import split_model
from orca_jax.speculation.drafter import Speculation, configured_speculation
from tests.device.engine.planned_requests import assert_same_logprobs, drawn_policies
from tests.device.harness import harness

SIZES: dict[str, Any] = {"max_batch_size": 16, "n_slots": 400, "max_batch_tokens": 16, "block_size": 4}
PREFIX = [5, 9, 2, 14, 33, 21, 7, 7, 60]  # two full blocks

ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "seed": 4, "logprobs": 1},
    {"temperature": 0.7, "seed": 5, "top_p": 0.8},
    {"temperature": 0.8, "seed": 1, "top_k": 5, "n": 2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
]
PROMPTS = [[*PREFIX, 3], [*PREFIX, 8, 1], [*PREFIX[:8], 44, 45, 46, 47], [7], [3, 1]]


@pytest.fixture
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside so small a model the host's work is most of the time: its drafts would never be worth it."""
    monkeypatch.setattr(
        local_draft, "draft_costs", lambda sizes, *_, **__: [0.0] * len(serving_buckets(sizes))
    )


@pytest.fixture
def hopeful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong drafts are followed by others at once, as many as are allowed."""
    monkeypatch.setattr(drafted, "_PAUSES", (0,))
    chances = classmethod(lambda _, requests: [0.9] * len(requests))
    monkeypatch.setattr(drafted.Drafted, "chances", chances)


class Round(NamedTuple):
    """A round of one request's drafts: the tokens before it, and each iteration's logits [V] of the head."""

    token_ids: list[int]
    logits: list[np.ndarray]


def head_engine(llm: LLM) -> DraftEngine:
    made = llm.service.speculation
    assert made is not None and isinstance(made.shared, DraftEngine)
    return made.shared


def head_workers(llm: LLM) -> LocalWorkers:
    engine = head_engine(llm)._engine
    assert isinstance(engine, EngineMaster) and isinstance(engine._workers, LocalWorkers)
    return engine._workers


def recorded(llm: LLM) -> list[Round]:
    """Note the rounds of a head that drafts for one request at a time."""
    shared, workers = head_engine(llm), head_workers(llm)
    rounds, draft, choose = list[Round](), shared.draft, workers._chooser.choose

    def drafting(wanted: Sequence[tuple[Request, int]]) -> list[Sequence[int] | None]:
        ((req, _),) = wanted
        rounds.append(Round([*req.prompt_ids, *req.output_ids], []))
        return draft(wanted)

    def choosing(raw: Any, *others: Any, **named: Any) -> Any:
        rounds[-1].logits.append(np.asarray(raw)[0])
        return choose(raw, *others, **named)

    shared.draft = drafting  # type: ignore[method-assign]
    workers._chooser.choose = choosing  # type: ignore[method-assign]
    return rounds


class Text(NamedTuple):
    """A prompt with its output; where each output token was `forced`, all drafts were right."""

    token_ids: list[int]
    forced: int | None = None

    def rounds(self, every: Sequence[Round]) -> list[Round]:
        """The rounds of drafts for this text, which are several tokens deep."""
        mine = [each for each in every if each.token_ids == self.token_ids[: len(each.token_ids)]]
        assert len(mine) > 4 and sum(len(each.logits) == 3 for each in mine) > 3
        return mine

    def drafted(self, logits: np.ndarray) -> int:
        return int(logits.argmax()) if self.forced is None else self.forced


def texts(llm: LLM, forced: int) -> list[Text]:
    """Texts of which the second begins cached, and in the last one all drafts are right."""
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    prompts = [[*PREFIX, 3, 4], [*PREFIX, 8, 1, 2], [8, *PREFIX[1:], 1]]
    found = [Text([*prompt, *llm.generate([prompt], [greedy])[0].token_ids]) for prompt in prompts]
    told = SamplingParams(max_tokens=22, temperature=0, ignore_eos=True, logit_bias={forced: 100.0})
    prompt = [9, 4, 1, 30]
    result = llm.generate([prompt], [told])[0]
    assert result.token_ids == [forced] * 22
    made = llm.service.speculation
    assert made is not None and made.n_accepted > 12
    return [*found, Text([*prompt, *result.token_ids], forced)]


Passed = Callable[..., tuple[np.ndarray, list[np.ndarray]]]


def dense(config: ModelConfig, parameters: Any) -> Passed:
    """The reference's logits and passed states of a text (`reference.forward`).

    A head needs the states before its tokens. Texts are padded to one length, which changes nothing before.
    """

    @jax.jit
    def run(ids: jax.Array, states: jax.Array | None) -> tuple[jax.Array, list[jax.Array]]:
        passed = list[jax.Array]()
        return reference.forward(config, parameters, ids, states=states, passed=passed), passed

    def of(token_ids: Sequence[int], states: np.ndarray | None = None) -> tuple[np.ndarray, list[np.ndarray]]:
        n_more = 32 - len(token_ids)
        ids = jnp.array([*token_ids, *[0] * n_more])
        logits, passed = run(ids, None if states is None else np.pad(states, ((0, n_more), (0, 0))))
        return np.asarray(logits)[: len(token_ids)], [np.asarray(each)[: len(token_ids)] for each in passed]

    return of


def results(directory: Path, speculative: str, **options: Any) -> tuple[list[GenerationResult], Any]:
    """All prompts with all parameters at once, and the service that ran them."""
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **asked) for asked in ASKED]
    with LLM(directory, speculative=speculative, speculative_tokens=3, seed=0, **SIZES | options) as llm:
        each = [(prompt, one) for one in params for prompt in PROMPTS]
        found = llm.generate([prompt for prompt, _ in each], [one for _, one in each])
        return found, llm.service


def assert_same_results(directory: Path, speculative: str, **options: Any) -> Any:
    """Results with the head are those without it, and some of its drafts were right; its service."""
    plain, _ = results(directory, "off", **options)
    with_drafts, service = results(directory, speculative, **options)
    made = service.speculation
    assert made.n_drafted > made.n_accepted > 20
    if "n_slots" in options:
        assert service.scheduler.n_preemptions > 0
    for theirs, ours in zip(plain, with_drafts, strict=True):
        assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
        assert_same_logprobs(ours.logprobs or [], theirs.logprobs or [], atol=1e-5)
    return service


# Drawn parameters of requests that run together.
SAMPLINGS = st.builds(
    SamplingParams,
    max_tokens=st.integers(3, 24),
    temperature=st.sampled_from([0.0, 0.0, 0.8]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 5),
    n=st.integers(1, 2),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, 60), st.sampled_from([-5.0, 5.0]), max_size=2),
    logprobs=st.none() | st.integers(0, 2),
    stop_token_ids=st.lists(st.integers(0, 60), max_size=2).map(tuple),
    min_tokens=st.integers(0, 3),
)
TAILS = st.lists(st.integers(0, 60), min_size=1, max_size=6)
PROMPT = st.builds(lambda stem, tail: [*stem, *tail], st.sampled_from([[], PREFIX]), TAILS)
DRAWN = st.lists(st.tuples(PROMPT, SAMPLINGS), min_size=1, max_size=5)


def assert_drawn_results_are_the_same(directory: Path, speculative: str, **options: Any) -> None:
    """Compare drawn requests with the head and without it, as their user sees them."""
    sizes = SIZES | options
    with (
        LLM(directory, seed=0, **sizes) as plain,
        LLM(directory, speculative=speculative, speculative_tokens=3, seed=0, **sizes) as drafting,
    ):

        @settings(
            max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
        )
        @example(asked=[(prompt, SamplingParams(max_tokens=24, temperature=0)) for prompt in PROMPTS])
        @given(asked=DRAWN)
        def results_are_equal(asked: list[tuple[list[int], SamplingParams]]) -> None:
            prompts, params = [prompt for prompt, _ in asked], [one for _, one in asked]
            expected, found = plain.generate(prompts, params), drafting.generate(prompts, params)
            for theirs, ours in zip(expected, found, strict=True):
                assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
                assert_same_logprobs(ours.logprobs or [], theirs.logprobs or [], atol=1e-5)

        results_are_equal()
        made = drafting.service.speculation
        assert made is not None
        assert made.n_drafted > made.n_accepted > 20, (made.n_drafted, made.n_accepted)


class Asked(NamedTuple):
    """A request that arrives before a step."""

    arrival: int
    prompt: list[int]
    sampling: SamplingParams
    priority: int


DRAWN_IN_TIME = st.lists(
    st.builds(Asked, st.integers(0, 6), PROMPT, SAMPLINGS, st.integers(0, 1)), min_size=2, max_size=6
)
CROWD = [
    Asked(i // 2, prompt, SamplingParams(max_tokens=24, temperature=temperature), priority=i % 2)
    for i, (prompt, temperature) in enumerate(product(PROMPTS, (0.0, 0.8)))
]


class Engines:
    """New engines with any policy on the workers of one that has a head, which keep their programs."""

    def __init__(self, llm: LLM) -> None:
        engine = llm.service.scheduler.engine
        assert isinstance(engine, EngineMaster) and isinstance(engine._workers, LocalWorkers)
        self.serving = llm.service.scheduler.config
        self._model, self._workers = llm.config, engine._workers.workers
        self._head, (self._head_worker,) = head_engine(llm), head_workers(llm).workers

    def play(
        self, asked: Sequence[Asked], serving: ServingConfig
    ) -> tuple[list[Request], Speculation | None, Scheduler]:
        """Play the requests, with drafts of the head if the policy has them."""
        ran = harness(self._model, {}, serving, workers=self._workers)
        speculation = configured_speculation(
            serving.scheduling, vocab_size=self._model.vocab_size, draft_model=self._drafter(ran.kv)
        )
        requests = [
            Request(
                str(i),
                tuple(one.prompt),
                len(one.prompt) + one.sampling.max_tokens,
                one.sampling,
                seed=i,
                end_token_ids=frozenset(one.sampling.stop_token_ids),
                kind=PLAIN if speculation is None else Drafted(speculation),
                priority=one.priority,
                owner=f"client {i % 2}",
            )
            for i, one in enumerate(asked)
        ]
        ran.run(requests, [one.arrival for one in asked])
        return requests, speculation, ran.scheduler

    def _drafter(self, served: KVManager) -> DraftEngine:
        """The head with an empty cache, beside the cache of a served model."""
        model, worker = self._head.model, self._head_worker
        scheduling = SchedulingConfig(prefix_caching=served.prefixes is not None)
        sizes = replace(self._head.config, scheduling=scheduling)
        parts = split_model(model, jax.devices()[:1])
        built = build_engine(model, [], sizes, parts, workers=[worker])
        costs = [0.0] * len(serving_buckets(sizes))
        drafter = DraftEngine(built.engine, built.kv, model=model, config=sizes, costs=costs)
        assert worker.states is not None
        drafter.served = ServedCache(served, worker.states.of_block)
        return drafter


def assert_drawn_policies_change_no_result(
    directory: Path, speculative: str, n_examples: int, **options: Any
) -> None:
    """Compare drawn requests by Algorithm 1 with those of drawn policies and the head."""
    sizes: dict[str, Any] = SIZES | {"n_slots": 120, "max_batch_tokens": 64} | options
    seen = Counter[str]()
    with LLM(directory, speculative=speculative, speculative_tokens=3, seed=0, **sizes) as llm:
        engines = Engines(llm)

        @settings(
            max_examples=n_examples,
            deadline=None,
            derandomize=n_examples <= 100,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @example(asked=CROWD, policy=SchedulingConfig(), overlap=True)
        @given(asked=DRAWN_IN_TIME, policy=drawn_policies(deterministic=False), overlap=st.booleans())
        def results_are_equal(asked: list[Asked], policy: SchedulingConfig, overlap: bool) -> None:
            expected, _, _ = engines.play(asked, replace(engines.serving, scheduling=ORCA))
            policy = replace(policy, speculative=speculative, speculative_tokens=3)
            found, made, scheduler = engines.play(
                asked, replace(engines.serving, scheduling=policy, overlap=overlap)
            )
            for theirs, ours in zip(expected, found, strict=True):
                assert (ours.output_ids, ours.finish_reason) == (theirs.output_ids, theirs.finish_reason)
                assert_same_logprobs(ours.logprobs, theirs.logprobs, atol=1e-5)
            assert made is not None and made.shared is not None and not made.shared.failed
            seen["accepted"] += made.n_accepted
            seen["rejected"] += made.n_drafted - made.n_accepted
            seen["preempted"] += scheduler.n_preemptions

        results_are_equal()
    assert seen["accepted"] > 20 and seen["rejected"] > 20 and seen["preempted"], seen
