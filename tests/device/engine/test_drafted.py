"""Speculative decoding on the real engine: the tokens are those of the same requests without it."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from orca_jax import LLM, SamplingParams
from orca_jax.config import SchedulingConfig
from orca_jax.engine import draft_engine
from orca_jax.engine.draft_engine import DraftEngine
from orca_jax.execution.worker import Worker
from orca_jax.iteration.message import ControlMessage
from orca_jax.iteration.rows import drafted as rows_of_drafts
from orca_jax.iteration.rows.drafted import Drafted, takes_drafts
from orca_jax.iteration.rows.message_builder import MessageBuilder, SentRows
from orca_jax.iteration.shape import serving_buckets
from orca_jax.launch import local_draft
from orca_jax.launch.local_engine import build_engine
from orca_jax.model_files.found_model import DEMO_MODEL
from orca_jax.planning.draft_model import draft_serving
from orca_jax.request.request import Request
from orca_jax.service.generation import GenerationResult
from orca_jax.speculation.drafter import Speculation
from tests.device.engine.planned_requests import (
    MODEL,
    SERVING,
    PlannedRequest,
    assert_same,
    assert_same_logprobs,
    parameters,
    planned_requests,
    play,
    stages,
)
from tests.device.harness import place

# Seeds differ from request to request, and each is drawn with other parameters.
CROWD = [
    PlannedRequest(0, tuple(range(17)), 28, SamplingParams(temperature=0.0, logprobs=2)),
    PlannedRequest(0, tuple(range(17)), 28, SamplingParams(temperature=1.3)),
    PlannedRequest(1, (*range(17), 3, 4), 28, SamplingParams(temperature=0.8, top_k=7, logprobs=0)),
    PlannedRequest(5, tuple(range(25)), 12, SamplingParams(temperature=1.0, top_p=0.8, min_p=0.02)),
    PlannedRequest(9, (1, 2), 20, SamplingParams(temperature=1.0, frequency_penalty=1.5)),
    PlannedRequest(12, (3, 1), 30, SamplingParams(temperature=0.0, repetition_penalty=1.7, logprobs=0)),
    PlannedRequest(20, (9, 8, 7), 24, SamplingParams(logit_bias={4: 5.0}), banned=(3, 40)),
    PlannedRequest(40, (4, 5, 6), 30, SamplingParams(temperature=0.7, prompt_logprobs=1)),
]


class Oracle:
    """Drafts the output that came without speculation, each token wrong with a probability of a quarter."""

    def __init__(self, output_ids: Sequence[int]) -> None:
        self._output_ids = output_ids
        self._random = random.Random(len(output_ids))

    def draft(self, output_ids: Sequence[int], n: int) -> Sequence[int]:
        right = self._output_ids[len(output_ids) :][:n]
        return [(token_id + (self._random.random() < 0.25)) % MODEL.vocab_size for token_id in right]


def drafted(all_planned: Sequence[PlannedRequest], expected: Sequence[Request]) -> Mapping[int, Drafted]:
    """A kind for each request whose outputs can be drafted."""
    return {
        i: Drafted(Speculation(lambda *_, known=req.output_ids: Oracle(known), 4, MODEL.vocab_size))
        for i, (planned, req) in enumerate(zip(all_planned, expected, strict=True))
        if takes_drafts(replace(planned.sampling, max_tokens=planned.n_output))
    }


def test_streams_are_those_without_speculation() -> None:
    seen = Counter[str]()

    @settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @example(all_planned=CROWD, n_stages=1, prefill_tokens=5, full=False, prefixes=True, lost_before=-1)
    @example(all_planned=CROWD, n_stages=2, prefill_tokens=None, full=True, prefixes=False, lost_before=12)
    @given(
        all_planned=planned_requests,
        n_stages=st.integers(1, 2),
        prefill_tokens=st.none() | st.integers(1, 12),
        full=st.booleans(),
        prefixes=st.booleans(),
        lost_before=st.integers(-1, 20),
    )
    def streams_are_equal(
        all_planned: list[PlannedRequest],
        n_stages: int,
        prefill_tokens: int | None,
        full: bool,
        prefixes: bool,
        lost_before: int,
    ) -> None:
        expected, _ = play(all_planned, 1, "no overlap")
        kinds = drafted(all_planned, expected)
        scheduling = SchedulingConfig(
            chunked_prefill=prefill_tokens is not None,
            prefill_tokens=prefill_tokens,
            prefix_caching=prefixes,
            reservation="full" if full else "on-demand",
            speculative="ngram",
        )
        requests, scheduler = play(
            all_planned, n_stages, "overlap", lost_before=lost_before, scheduling=scheduling, kinds=kinds
        )
        for ours, theirs in zip(requests, expected, strict=True):
            assert_same(ours, theirs)
        counts = [kind.speculation for kind in kinds.values()]
        seen["preempted"] += scheduler.n_preemptions
        seen["adjusted"] += sum(
            kind.speculation.n_accepted
            for i, kind in kinds.items()
            if (all_planned[i].sampling.repetition_penalty, all_planned[i].sampling.frequency_penalty)
            != (1, 0)
        )
        seen["accepted"] += sum(count.n_accepted for count in counts)
        seen["rejected"] += sum(count.n_drafted - count.n_accepted for count in counts)

    streams_are_equal()
    # The examples that are written out suffice for these.
    assert seen["preempted"] and seen["accepted"] > 30 and seen["rejected"] > 10, seen
    assert seen["adjusted"] > 3, seen


@pytest.mark.parametrize("fault", ["one more draft is kept", "noise of the next token"])
def test_a_fault_changes_streams(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = [planned for planned in CROWD if not planned.banned]  # a constraint would notice the latter
    expected, _ = play(crowd, 1, "no overlap")
    scheduling = SchedulingConfig(prefill_tokens=5, speculative="ngram")
    requests, _ = play(crowd, 1, "overlap", scheduling=scheduling, kinds=drafted(crowd, expected))
    for ours, theirs in zip(requests, expected, strict=True):
        assert_same(ours, theirs)
    n_right, message = rows_of_drafts._n_right, MessageBuilder.message
    if fault == "one more draft is kept":
        monkeypatch.setattr(
            rows_of_drafts, "_n_right", lambda drafts, ids: min(n_right(drafts, ids) + 1, len(drafts))
        )
    else:

        def mutant(self: MessageBuilder, sent: SentRows, *rest: Any) -> ControlMessage:
            made = message(self, sent, *rest)
            index = made.token_index.copy()
            index[[] if sent.known is None else sent.known.at] += 1
            return replace(made, token_index=index)

        monkeypatch.setattr(MessageBuilder, "message", mutant)
    requests, _ = play(crowd, 1, "overlap", scheduling=scheduling, kinds=drafted(crowd, expected))
    assert [req.output_ids for req in requests] != [req.output_ids for req in expected]


DRAFT_SIZES = replace(draft_serving(SERVING, n_slots=96, prefix_caching=True), max_batch_tokens=16)


@cache
def draft_workers() -> Sequence[Worker]:
    """The worker of a draft model that is the served model itself."""
    built = build_engine(
        MODEL, place(MODEL, parameters(), stages(1)[0]), DRAFT_SIZES, stages(1)[0], buckets=(8, 16)
    )
    return built.workers.workers


@pytest.mark.parametrize("other_seeds", [False, True])
def test_streams_are_those_without_a_draft_model(other_seeds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same seeds it draws the same tokens, with the same penalties and biases; with others, not."""
    if other_seeds:
        plain = draft_engine._plain
        monkeypatch.setattr(
            draft_engine, "_plain", lambda req, *rest: replace(plain(req, *rest), seed=req.seed + 99)
        )
    expected, _ = play(CROWD, 1, "no overlap")
    built = build_engine(MODEL, [], DRAFT_SIZES, stages(1)[0], buckets=(8, 16), workers=draft_workers())
    costs = [0.0] * len(serving_buckets(DRAFT_SIZES))
    engine = DraftEngine(built.engine, built.kv, model=MODEL, config=DRAFT_SIZES, costs=costs)
    kinds = {
        i: Drafted(Speculation(lambda *_: Oracle(()), 3, MODEL.vocab_size, shared=engine))
        for i in range(len(CROWD))
    }
    scheduling = SchedulingConfig(prefill_tokens=5, speculative="ngram")
    requests, _ = play(CROWD, 1, "overlap", lost_before=12, scheduling=scheduling, kinds=kinds)
    for ours, theirs in zip(requests, expected, strict=True):
        assert_same(ours, theirs)
    assert not engine.failed
    # It does not know the words that are banned.
    each = [kinds[i].speculation for i, planned in enumerate(CROWD) if not planned.banned]
    n_right, n_compared = (sum(one.n_right for one in each), sum(one.n_compared for one in each))
    assert n_compared > 10
    assert (n_right == n_compared) is not other_seeds, (n_right, n_compared)


# From the engine's options to text: the demo model repeats itself, so that n-grams find drafts.
PROMPTS = ["one two three one two three one two", "the cat sat on the mat, and the cat sat on the"]
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 0.0, "stop": ("e",)},
    {"temperature": 0.6, "seed": 3, "top_k": 4},
    {"temperature": 0.5, "seed": 1, "n": 2},
    {"temperature": 0.0, "prediction": "one two three, one two three, the cat sat on the mat"},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.7, "seed": 2, "guided_regex": "(one two three )*four"},
    {"temperature": 0.7, "seed": 5, "guided_regex": "the price is [0-9]+ (dollars|euros) each"},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(0, 400, 3)), "min_tokens": 20},
    {"temperature": 0.0, "bad_words": ("the", "two three")},
    # Without drafts, in the same iterations:
    {"temperature": 0.0, "use_beam_search": True, "n": 2},
]


def results(speculative: str, **options: Any) -> tuple[list[GenerationResult], Speculation | None]:
    """All outputs, of requests that run together."""
    params = [SamplingParams(max_tokens=40, ignore_eos=True, **asked) for asked in ASKED]
    sizes: dict[str, Any] = {"max_batch_size": 24, "n_slots": 2048, "max_batch_tokens": 64, **options}
    with LLM(speculative=speculative, speculative_tokens=3, seed=0, **sizes) as llm:
        each = [(prompt, one) for one in params for prompt in PROMPTS]
        return llm.generate([prompt for prompt, _ in each], [one for _, one in each]), llm.service.speculation


def assert_same_results(drafters: Sequence[str], *, atol: float, **options: Any) -> None:
    plain, none = results("off", **options)
    assert none is None
    for name in drafters:
        with_drafts, made = results(name, **options)
        assert made is not None and made.n_drafted > made.n_accepted > 40
        for theirs, ours in zip(plain, with_drafts, strict=True):
            assert (ours.text, ours.token_ids, ours.finish_reason) == (
                theirs.text,
                theirs.token_ids,
                theirs.finish_reason,
            )
            assert_same_logprobs(ours.logprobs or [], theirs.logprobs or [], atol=atol)


def test_an_engine_with_drafts_gives_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    # As its own draft model, the demo model would cost more than it saves.
    monkeypatch.setattr(
        local_draft, "draft_costs", lambda sizes, *_, **__: [0.0] * len(serving_buckets(sizes))
    )
    assert_same_results(["ngram", "suffix", f"draft:{DEMO_MODEL}"], atol=1e-5)


@pytest.mark.matrix
def test_deterministic_the_bits_are_the_same() -> None:
    assert_same_results(["ngram"], atol=0.0, deterministic=True, max_batch_tokens=512)
