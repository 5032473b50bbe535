"""Every generation parameter in the whole engine, against a slow computation on the reference model's logits.

Sixteen requests, each with another parameter, run together on one stage and on two; each gets the same tokens
as alone. A greedy choice must be the slow computation's, a drawn one among those that the slow computation
keeps.
"""

from collections import Counter
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from orca_jax.config import ParallelConfig, ServingConfig
from orca_jax.grammar.constraint import BadWords, ConstraintRules
from orca_jax.model import reference
from orca_jax.model.transformer import init_parameters
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.restart import run_again
from orca_jax.sharding.partition import split_model
from tests.device.harness import Harness, harness
from tests.gpt_config import gpt_config

EOS = 5
MODEL = gpt_config(
    vocab_size=211,
    n_positions=96,
    hidden_size=24,
    n_layers=2,
    n_heads=3,
    ffn_size=40,
    vocab_multiple=8,
    eos_token_ids=(EOS,),
)
N_OUTPUT = 24
MARGIN = 1e-3  # two adjusted logits closer than this may change places by rounding alone
PROMPT = tuple(np.random.default_rng(4).integers(0, 211, 17).tolist())

# Each but the first uses one parameter; the greedy ones change what the first, which uses none, would get.
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {"temperature": 0.0},
    "repetition_penalty": {"temperature": 0.0, "repetition_penalty": 1.8},
    "frequency_penalty": {"temperature": 0.0, "frequency_penalty": 1.7},
    "presence_penalty": {"temperature": 0.0, "presence_penalty": 1.9},
    "a negative penalty": {"temperature": 0.0, "frequency_penalty": -2.0},
    "logit_bias": {"temperature": 0.0, "logit_bias": {17: 9.0, 3: -100.0, 100: 8.5}},
    "min_tokens": {"temperature": 0.0, "min_tokens": 9, "logit_bias": {EOS: 100.0}, "ignore_eos": False},
    "stop_token_ids": {"temperature": 0.0, "stop_token_ids": (31,), "logit_bias": {31: 6.0}},
    "allowed_token_ids": {"temperature": 0.0, "allowed_token_ids": (1, 40, 41, 70, 90, 210)},
    "bad_words": {"temperature": 0.0},  # see `request`: words are token ids here
    "temperature": {"temperature": 1.5},
    "seed": {"temperature": 1.0, "seed": 99},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.4},
    "min_p": {"temperature": 1.0, "min_p": 0.3},
    "logprobs": {"temperature": 0.7, "logprobs": 4, "prompt_logprobs": 2},
}


@cache
def parameters() -> dict[str, jax.Array]:
    p = init_parameters(MODEL, jax.random.key(3), jnp.float32)
    return {name: value * (1 if value.ndim == 1 else 12) for name, value in p.items()}


@cache
def engine(n_stages: int) -> Harness:
    serving = ServingConfig(max_batch_size=16, n_slots=2048, max_batch_tokens=512, block_size=8)
    parts = split_model(MODEL, jax.devices(), ParallelConfig(pipeline_parallel=n_stages))
    return harness(MODEL, parameters(), serving, buckets=(24, 512), parts=parts)


@cache
def bad_words() -> tuple[tuple[int, ...], ...]:
    """Bad words: two tokens of the output without parameters, and a pair of them."""
    tokens = alone("nothing").output_ids
    return ((tokens[2],), (tokens[0], tokens[1]), (PROMPT[-2], PROMPT[-1], tokens[0]))


def request(name: str) -> Request:
    fields = {"max_tokens": N_OUTPUT, "ignore_eos": True, **ASKED[name]}
    sampling = SamplingParams(**fields)
    ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else {EOS})
    rules = ConstraintRules(
        vocab_size=MODEL.vocab_size,
        end_token_ids=ends,
        min_tokens=sampling.min_tokens,
        bad_words=BadWords(bad_words() if name == "bad_words" else ()),
        allowed_token_ids=sampling.allowed_token_ids,
    )
    return Request(
        name,
        PROMPT,
        len(PROMPT) + N_OUTPUT,
        sampling,
        seed=7 if sampling.seed is None else sampling.seed,
        end_token_ids=ends,
        constraint=rules.begin(),
    )


@cache
def alone(name: str) -> Request:
    single = request(name)
    engine(1).run([single])
    return single


@cache
def reference_jitted():
    return jax.jit(lambda tokens: reference.forward(MODEL, parameters(), tokens))


def raw_logits(tokens: list[int]) -> np.ndarray:
    """The reference model's logits [len(tokens), V] in float64."""
    padded = jnp.array(tokens + [0] * (MODEL.n_positions - len(tokens)))
    return np.asarray(reference_jitted()(padded), np.float64)[: len(tokens)]


def slow(name: str, raw: np.ndarray, output: list[int]) -> np.ndarray:
    """The logits [V] from which a token is chosen, computed step by step."""
    params = request(name).sampling
    logits = raw.copy()
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in {*PROMPT, *output}:
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token, count in Counter(output).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    banned = set[int]()
    if len(output) < params.min_tokens:
        banned |= {EOS}
    if name == "bad_words":
        known = [*PROMPT, *output]
        banned |= {word[-1] for word in bad_words() if known[len(known) - len(word) + 1 :] == [*word[:-1]]}
    if params.allowed_token_ids is not None:
        banned |= set(range(MODEL.vocab_size)) - set(params.allowed_token_ids)
    logits[list(banned)] = -np.inf
    return logits


def kept_by_hand(params: SamplingParams, logits: np.ndarray) -> set[int]:
    """The tokens that may be drawn, with a small tolerance for sums in float32."""
    p = np.exp((logits - logits.max()) / params.temperature)
    order = np.argsort(-p)
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    enough = int(np.searchsorted(np.cumsum(p[order]), min(params.top_p + 1e-4, 1.0))) + 1
    p[order[enough:]] = 0
    return set(np.flatnonzero((p > 0) & (p >= (params.min_p - 1e-4) * p.max())).tolist())


@pytest.mark.parametrize("name", ASKED)
def test_each_choice_is_that_of_a_slow_computation(name: str) -> None:
    result = alone(name)
    raw = raw_logits([*PROMPT, *result.output_ids])
    n_sure = 0
    for i, token in enumerate(result.output_ids):
        logits = slow(name, raw[len(PROMPT) + i - 1], result.output_ids[:i])
        if result.sampling.temperature > 0:
            assert token in kept_by_hand(result.sampling, logits), i
            continue
        best, second = np.sort(logits)[:-3:-1]
        if best - second < MARGIN:
            break
        assert token == logits.argmax(), i
        n_sure += 1
    assert result.sampling.temperature > 0 or n_sure >= min(9, len(result.output_ids))


def test_no_parameter_is_ignored() -> None:
    plain = alone("nothing").output_ids
    for name, fields in ASKED.items():
        if fields["temperature"] == 0 and name != "nothing":
            assert alone(name).output_ids != plain, name
    drawn = [name for name, fields in ASKED.items() if fields["temperature"] > 0]
    assert len({tuple(alone(name).output_ids) for name in drawn}) == len(drawn)
    result = alone("min_tokens")
    assert (len(result.output_ids), result.output_ids[-1]) == (10, EOS), "the ninth token and not before"
    result = alone("stop_token_ids")
    assert result.output_ids[-1] == 31 and result.finish_reason is FinishReason.STOP
    assert 31 not in result.output_ids[:-1]


def test_logprobs_are_the_models_own() -> None:
    result = alone("logprobs")
    exact = log_softmax(raw_logits([*PROMPT, *result.output_ids]), axis=-1)
    assert result.prompt_logprobs is not None
    logprobs = [*result.prompt_logprobs, *result.logprobs]
    assert len(logprobs) == len(PROMPT) + N_OUTPUT - 1
    for i, token in enumerate(logprobs):
        n_top = 2 if i < len(PROMPT) - 1 else 4
        assert token.token_id == [*PROMPT, *result.output_ids][i + 1]
        np.testing.assert_allclose(token.logprob, exact[i, token.token_id], atol=1e-4)
        ids, values = zip(*token.top, strict=True)
        np.testing.assert_allclose(values, np.sort(exact[i])[::-1][:n_top], atol=1e-4)
        np.testing.assert_allclose(exact[i, list(ids)], values, atol=1e-4)


@pytest.mark.parametrize("n_stages", [pytest.param(1, marks=pytest.mark.long), 2])
def test_sixteen_requests_with_a_parameter_each_get_what_they_get_alone(n_stages: int) -> None:
    together = [request(name) for name in ASKED]
    engine(n_stages).run(together, [i % 5 for i in range(len(together))])
    for batched in together:
        expected = alone(batched.request_id)
        assert batched.output_ids == expected.output_ids, batched.request_id
        assert batched.finish_reason is expected.finish_reason
        result, wanted = ([o.logprob for o in r.logprobs] for r in (batched, expected))
        np.testing.assert_allclose(result, wanted, atol=1e-4)


def test_a_resumed_request_keeps_its_output_history() -> None:
    """After a fault its counts are made again, from the prompt and from the output so far."""
    for name in ("repetition_penalty", "frequency_penalty", "presence_penalty", "logprobs"):
        house = engine(1)
        again = request(name)
        house.pool.add(again)
        for _ in range(7):
            house.scheduler.step()
        run_again(house.scheduler)  # of what is in flight nothing comes back
        house.run([])
        assert again.output_ids == alone(name).output_ids, name
        assert len(again.logprobs) == len(alone(name).logprobs)
        assert again.prompt_logprobs == alone(name).prompt_logprobs
