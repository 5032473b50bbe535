"""Beam search on the real engine: tokens and scores of a plain search over the reference model's logits.

Searches run in one batch with other requests, under every policy, on stages, and after preemption. They are
also compared with those of Hugging Face's transformers (tests/data/golden).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import ORCA, ParallelConfig, SchedulingConfig, ServingConfig
from orca_jax.iteration.rows.beams import Beams
from orca_jax.model import reference
from orca_jax.model.transformer import init_parameters
from orca_jax.request.beam_search import begin_search
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.service.prepared_params import RuleMaker
from orca_jax.sharding.partition import split_model
from tests.device.harness import Harness, greedy_request, harness
from tests.device.model.golden_beams import NAMES, load_beams
from tests.gpt_config import gpt_config
from tests.plain_beam_search import plain_search

VOCAB = 61
MODEL = gpt_config(
    vocab_size=VOCAB, n_positions=64, hidden_size=32, n_layers=2, n_heads=2, ffn_size=48, vocab_multiple=8
)
END = frozenset({3, 17, 40})
POLICIES = {
    "orca": ORCA,
    "default": SchedulingConfig(prefill_tokens=8),
    "full": SchedulingConfig(reservation="full"),
    "on demand alone": SchedulingConfig(prefix_caching=False, chunked_prefill=False),
}


@cache
def parameters() -> dict[str, jax.Array]:
    p = init_parameters(MODEL, jax.random.key(5), jnp.float32)
    return {name: value * (1 if value.ndim == 1 else 12) for name, value in p.items()}


@cache
def engine(policy: str, *, n_stages: int = 1, overlap: bool = True) -> Harness:
    serving = ServingConfig(
        max_batch_size=8,
        n_slots=104,
        max_batch_tokens=32,
        block_size=4,
        overlap=overlap,
        scheduling=POLICIES[policy],
    )
    parts = split_model(MODEL, jax.devices(), ParallelConfig(pipeline_parallel=n_stages))
    return harness(MODEL, parameters(), serving, parts=parts, buckets=(8, 32), attention="follow_lengths")


def search(name: str, prompt: Sequence[int], n_output: int, width: int, **rules: Any) -> Request:
    sampling = SamplingParams(max_tokens=n_output, use_beam_search=True, best_of=width, **rules)
    kind = Beams(begin_search(sampling, END))
    return Request(name, tuple(prompt), len(prompt) + n_output, sampling, 0, END, kind=kind)


@cache
def next_logprobs(tokens: tuple[int, ...]) -> np.ndarray:
    logits = padded_forward()(jnp.array([*tokens, *[0] * (48 - len(tokens))]))
    return log_softmax(np.asarray(logits[len(tokens) - 1, :VOCAB], np.float64))


@cache
def padded_forward():
    return jax.jit(lambda tokens: reference.forward(MODEL, parameters(), tokens))


def check(request: Request, *, tolerance: float = 1e-4) -> None:
    sampling, found = request.sampling, request.kind.found
    assert found
    expected = plain_search(
        lambda output: next_logprobs((*request.prompt_ids, *output)),
        VOCAB,
        sampling.n_beams,
        max_tokens=sampling.max_tokens,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
        end_token_ids=END,
    )
    assert [one.token_ids for one in found] == [token_ids for token_ids, _ in expected]
    np.testing.assert_allclose([one.score for one in found], [score for _, score in expected], atol=tolerance)
    assert tuple(request.output_ids) == expected[0][0]
    stopped = request.output_ids[-1] in END
    assert request.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def some_searches(seed: int, n: int, *, most_output: int = 9) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        search(
            f"search {i}",
            rng.integers(0, VOCAB, rng.integers(1, 12)).tolist(),
            int(rng.integers(1, most_output)),
            int(rng.integers(1, 6)),
            length_penalty=float(rng.choice((0.6, 1.0, 2.0))),
            early_stopping=(False, True, "never")[int(rng.integers(3))],
        )
        for i in range(n)
    ]


def greedy_ones(seed: int, n: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 12, (n, 2)).tolist()
    return [
        greedy_request(f"greedy {i}", rng.integers(0, VOCAB, n_input).tolist(), n_output)
        for i, (n_input, n_output) in enumerate(sizes)
    ]


def check_greedy(request: Request) -> None:
    known = request.prompt_ids
    for token_id in request.output_ids:
        assert token_id == int(next_logprobs(known).argmax())
        known = (*known, token_id)


@pytest.mark.parametrize("policy", POLICIES)
def test_searches_beside_others_find_what_each_finds_alone(policy: str) -> None:
    searches, others = some_searches(1, 4), greedy_ones(2, 4)
    mixed = [one for pair in zip(searches, others, strict=True) for one in pair]
    engine(policy).run(mixed, [0, 0, 1, 2, 3, 3, 5, 6])
    for request in searches:
        check(request)
    for request in others:
        check_greedy(request)


def test_with_too_little_memory_for_all_they_are_preempted_and_start_over() -> None:
    searches = [search(f"search {i}", [i, 5, 7 + i, 9], 12, 4, early_stopping="never") for i in range(3)]
    others = greedy_ones(8, 2)
    one = engine("default")
    before = one.scheduler.n_preemptions
    taken: list[int] = []

    def take_memory(step: int) -> None:
        if step == 5:
            taken.append(one.kv.reserve(one.kv.n_free_blocks * one.kv.block_size))
        elif step == 20:
            one.kv.release(taken.pop())

    one.run([*searches, *others], [0, 0, 3, 1, 1], before_step=take_memory)
    for request in searches:
        check(request)
    for request in others:
        check_greedy(request)
    assert one.scheduler.n_preemptions > before


@pytest.mark.matrix(but=["2-True"])
@pytest.mark.parametrize("n_stages, overlap", [(1, False), (2, True)])
def test_on_stages_and_without_overlap(n_stages: int, overlap: bool) -> None:
    searches = some_searches(5, 4)
    engine("default", n_stages=n_stages, overlap=overlap).run(
        [*searches, *greedy_ones(6, 3)], [0, 0, 1, 1, 2, 3, 4]
    )
    for request in searches:
        check(request)


def check_golden(name: str, max_batch_size: int, n_searches: int | None = None) -> None:
    """Check the last few golden searches, or all, that fit in such a batch, among greedy requests."""
    golden = load_beams(name)
    checkpoint = load_checkpoint(golden.directory, dtype=jnp.float32)
    model = checkpoint.config
    serving = ServingConfig(max_batch_size=max_batch_size, n_slots=1024, max_batch_tokens=64, block_size=4)
    one = harness(model, checkpoint.parameters, serving, buckets=(max_batch_size, 64))
    rules = RuleMaker(replace(model, eos_token_ids=golden.eos_token_ids), None, max_batch_size=max_batch_size)
    fitting = [own for own in golden.searches if own.n_beams <= max_batch_size][-(n_searches or 1000) :]
    requests: list[Request] = []
    for i, own in enumerate(fitting):
        sampling = SamplingParams(
            max_tokens=golden.max_output,
            use_beam_search=True,
            best_of=own.n_beams,
            n=own.n_beams,
            length_penalty=own.length_penalty,
            early_stopping=own.early_stopping,  # pyright: ignore[reportArgumentType]
        )
        made, n_tokens = rules.rules(sampling), len(own.prompt) + golden.max_output
        request = Request(f"search {i}", own.prompt, n_tokens, sampling, 0, made.end_token_ids)
        request.kind, request.encoder_ids = made.kind(), own.encoder_ids
        requests.append(request)
    others = [greedy_request(f"other {i}", own.prompt, 5 + i) for i, own in enumerate(fitting[:8])]
    for other, own in zip(others, fitting, strict=False):
        other.encoder_ids = own.encoder_ids
    one.run([*others, *requests], [*range(len(others)), *(i // 3 for i in range(len(requests)))])
    for request, own in zip(requests, fitting, strict=True):
        assert request.kind.found
        assert tuple(one.token_ids for one in request.kind.found) == own.tokens
        np.testing.assert_allclose([one.score for one in request.kind.found], own.scores, atol=1e-4)


@pytest.mark.parametrize(
    "name, max_batch_size", [("llama-grouped", 3), pytest.param("t5-gated", 32, marks=pytest.mark.long)]
)
def test_searches_are_those_of_transformers(name: str, max_batch_size: int) -> None:
    check_golden(name, max_batch_size, n_searches=6)


# All decoders, and the first shape of each family with an encoder.
LONG = [*{name.split("-")[0]: name for name in reversed(NAMES)}.values()]


@pytest.mark.long
@pytest.mark.parametrize("name, max_batch_size", [*((name, 32) for name in LONG), ("t5-gated", 3)])
def test_all_searches_are_those_of_transformers(name: str, max_batch_size: int) -> None:
    check_golden(name, max_batch_size)
