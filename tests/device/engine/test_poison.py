"""Extreme parameters and logits of one request harm no other.

Its token is in the vocabulary, no log-probability is NaN, and its neighbours get the same bits as without it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orca_jax.config import ServingConfig
from orca_jax.errors import InvalidSamplingParameter, OutputFailed
from orca_jax.grammar.token_mask import words_of
from orca_jax.launch.local_engine import build_engine
from orca_jax.model.sampler import IN_PROMPT, adjust, allow, greedy, logprobs, sample
from orca_jax.model.transformer import init_parameters
from orca_jax.request.sampling_params import REPETITION_RANGE, TEMPERATURE_RANGE, TOP_P_RANGE, SamplingParams
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.service.generation import GenerationResult
from orca_jax.service.orca import Orca
from orca_jax.sharding.partition import split_model
from tests.device.harness import default_buckets, place
from tests.gpt_config import gpt_config
from tests.host.engines import LETTERS, SOON

VOCAB = 300  # not a multiple of what the sampler takes together
FLOAT32 = np.finfo(np.float32)
NASTY = [
    0.0,
    1.0,
    -1.0,
    80.0,
    1e30,
    -1e30,
    FLOAT32.max,
    FLOAT32.min,
    FLOAT32.tiny,
    math.inf,
    -math.inf,
    math.nan,
]
FEW = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def within(low: float, high: float, *more: float) -> st.SearchStrategy[float]:
    """Values of a range, mostly its bounds and values near them."""
    return st.one_of(st.sampled_from([low, high, *more]), st.floats(low, high))


token_ids = st.one_of(st.sampled_from([0, 5, 255, 256, VOCAB - 1]), st.integers(0, VOCAB - 1))
texts = st.text(st.sampled_from("ab \n\x00é"), min_size=1, max_size=8)
GRAMMARS = st.sampled_from(
    [
        {"guided_json": '{"type": "object"}'},
        {"guided_json_object": True},
        {"guided_regex": "[ab]{1,3}"},
        {"guided_choice": ("yes", "no", "é")},
        {"guided_grammar": 'start: "a"* | "b"'},
    ]
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "min_tokens": st.integers(0, 6),
    "temperature": within(*TEMPERATURE_RANGE, 0.0, 1e-3, 1.0),
    "top_p": within(*TOP_P_RANGE, 1e-6, 0.999999),
    "top_k": st.one_of(st.sampled_from([-1, 0, 1, 2, VOCAB, 1 << 30]), st.integers(-1, 1 << 30)),
    "min_p": within(0.0, 1.0, 1e-45, 0.999999),
    "repetition_penalty": within(*REPETITION_RANGE),
    "frequency_penalty": within(-2.0, 2.0),
    "presence_penalty": within(-2.0, 2.0),
    "logit_bias": st.dictionaries(token_ids, within(-100.0, 100.0), max_size=VOCAB),
    "seed": st.one_of(st.none(), st.integers(-(1 << 63), (1 << 63) - 1)),
    "ignore_eos": st.booleans(),
    "stop": st.lists(texts, max_size=3),
    "stop_token_ids": st.lists(token_ids, max_size=4),
    "allowed_token_ids": st.lists(token_ids, min_size=1, max_size=VOCAB),
    "bad_words": st.lists(texts, max_size=4),
    "logprobs": st.integers(0, 20),
    "prompt_logprobs": st.integers(0, 20),
    "grammar": GRAMMARS,
}
# Fields of beams exclude most others, and choose nothing on the device (tests/device/engine/test_beams.py).
BEAMS = {"use_beam_search", "best_of", "length_penalty", "early_stopping"}
EXPERTS = {"return_routed_experts"}  # this model has none
DRAFTS = {"speculative", "prediction"}  # this engine makes none
assert {*FIELDS, *BEAMS, *EXPERTS, *DRAFTS, "n", "max_tokens"} - {"grammar"} == {
    name for name in SamplingParams.__slots__ if not name.startswith("guided_")
}, "a new parameter wants its place here"


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    """Any allowed combination of sampling parameters."""
    names = draw(st.sets(st.sampled_from(sorted(FIELDS))))
    if "grammar" in names:
        names.discard("allowed_token_ids")
    fields: dict[str, Any] = {"max_tokens": 6}
    for name in sorted(names):
        value = draw(FIELDS[name])
        fields |= value if name == "grammar" else {name: value}
    return SamplingParams(**fields)


# The sampler alone, on logits of every kind.


@dataclass(frozen=True)
class Row:
    """One row's logits [V] and what acts on them."""

    logits: np.ndarray
    params: SamplingParams
    seen: np.ndarray
    index: int = 3


N_ROWS = 4


@cache
def neighbours() -> list[Row]:
    rng = np.random.default_rng(0)
    ordinary = [
        SamplingParams(temperature=0.0, repetition_penalty=1.3),
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=1.2, top_p=0.8, top_k=40, frequency_penalty=0.5, seed=4),
    ]
    return [
        Row(rng.normal(0, 4, VOCAB).astype(np.float32), params, rng.integers(0, 3, VOCAB).astype(np.int32))
        for params in ordinary
    ]


@partial(jax.jit, static_argnames=("acts", "allows", "cut"))
def choose(rows: dict[str, jax.Array], *, acts: bool, allows: bool, cut: bool) -> tuple[jax.Array, ...]:
    """Adjusted logits, greedy and drawn tokens, and the log-probabilities of the drawn ones."""
    raw = logits = rows["logits"]
    if acts:
        names = ("seen", "bias", "repetition_penalty", "frequency_penalty", "presence_penalty")
        logits = adjust(logits, *(rows[name] for name in names))
    adjusted = logits
    if allows:
        logits = allow(logits, rows["words"])
    names = ("temperature", "top_k", "top_p", "min_p", "low", "high", "index")
    drawn = sample(logits, *(rows[name] for name in names), cut=cut)
    return adjusted, greedy(logits), drawn, *logprobs(raw, drawn, 20, jnp.array(True))


def arrays(rows: Sequence[Row]) -> dict[str, jax.Array]:
    """The rows' parameters as the engine passes them to the sampler."""
    reals = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    made = {name: np.array([getattr(row.params, name) for row in rows], np.float32) for name in reals}
    bias = np.zeros((len(rows), VOCAB), np.float32)
    for own, row in zip(bias, rows, strict=True):
        own[list(row.params.logit_bias)] = list(row.params.logit_bias.values())
    seeds = np.array([row.params.seed or 0 for row in rows], np.int64)
    made |= {
        "logits": np.stack([row.logits for row in rows]),
        "seen": np.stack([row.seen for row in rows]),
        "bias": bias,
        "top_k": np.array([row.params.top_k for row in rows], np.int32),
        "low": (seeds & 0xFFFFFFFF).astype(np.uint32).view(np.int32),
        "high": (seeds >> 32).astype(np.int32),
        "index": np.array([row.index for row in rows], np.int32),
        "words": np.stack([words_of(row.params.allowed_token_ids, VOCAB) for row in rows]),
    }
    return {name: jnp.asarray(array) for name, array in made.items()}


@st.composite
def any_logits(draw: st.DrawFn) -> np.ndarray:
    """Ordinary logits with some extreme ones among them, or all of one extreme kind."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    spread = draw(st.sampled_from([0.0, 1.0, 30.0, 1e30, 5e37]))
    logits = (rng.normal(0, 1, VOCAB) * spread).astype(np.float32)
    for value in draw(st.lists(st.sampled_from(NASTY), max_size=3)):
        logits[rng.random(VOCAB) < draw(st.sampled_from([0.004, 0.3, 1.0]))] = value
    return logits


@FEW
@given(any_logits(), sampling_params(), st.tuples(*[st.booleans()] * 3), st.integers(0, 1 << 30), st.data())
def test_any_logits_and_any_parameters_give_a_token_and_disturb_no_neighbour(
    logits: np.ndarray,
    params: SamplingParams,
    programs: tuple[bool, bool, bool],
    often: int,
    data: st.DataObject,
) -> None:
    seen = np.random.default_rng(often).integers(0, 2, VOCAB).astype(np.int32) * often
    seen[::3] |= IN_PROMPT
    poison = Row(logits, params, np.minimum(seen, (1 << 31) - 1))
    at = data.draw(st.integers(0, N_ROWS - 1))
    others = neighbours()
    acts, allows, cut = programs
    choice = choose(arrays([*others[:at], poison, *others[at:]]), acts=acts, allows=allows, cut=cut)
    calm = choose(arrays([*others[:at], others[0], *others[at:]]), acts=acts, allows=allows, cut=cut)
    adjusted, best, drawn, of_drawn, top_ids, of_top = map(np.asarray, choice)
    if acts:
        assert np.isfinite(adjusted).all()
    for tokens in (best, drawn, top_ids):
        assert ((tokens >= 0) & (tokens < VOCAB)).all()
    if allows and params.allowed_token_ids is not None:
        assert {int(best[at]), int(drawn[at])} <= set(params.allowed_token_ids)
    if params.temperature == 0:
        assert drawn[at] == best[at]
    assert not np.isnan(of_drawn).any() and not np.isnan(of_top).any()
    assert (of_drawn <= 1e-5).all() and (of_top <= 1e-5).all()
    for mine, theirs in zip(choice, calm, strict=True):
        np.testing.assert_array_equal(np.delete(mine, at, axis=0), np.delete(theirs, at, axis=0))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_forbidden_tokens_are_never_chosen(value: float) -> None:
    params = SamplingParams(allowed_token_ids=(5, 7), seed=1)
    poison = Row(np.full(VOCAB, value, np.float32), params, np.zeros(VOCAB, np.int32))
    for acts in (False, True):
        _, best, drawn, *_ = choose(arrays([poison] * 50), acts=acts, allows=True, cut=True)
        assert set(np.asarray(best).tolist()) | set(np.asarray(drawn).tolist()) <= {5, 7}


# The whole engine: a model in which some tokens' embeddings are not finite. A request whose prompt has one of
# these gets logits that are NaN, and leaves NaN in the slots that it gives back.

MODEL = gpt_config(
    vocab_size=VOCAB,
    n_positions=48,
    hidden_size=32,
    n_layers=2,
    n_heads=2,
    ffn_size=48,
    tie_embeddings=False,
    eos_token_ids=(256,),
)
SERVING = ServingConfig(max_batch_size=4, n_slots=192, max_batch_tokens=64, block_size=8, deterministic=True)
POISONED = {290: math.nan, 291: math.inf, 292: FLOAT32.max}  # token ids with their embeddings
PROMPTS = ([72, 105], [10] * 9, [40, 50, 60, 70])


@cache
def engine() -> Orca:
    """An engine that all examples share, so that each reuses the slots of earlier ones."""
    parameters = init_parameters(MODEL, jax.random.key(3), jnp.float32)
    parameters = {name: value * (1 if value.ndim == 1 else 8) for name, value in parameters.items()}
    for token_id, value in POISONED.items():
        parameters["token_embedding"] = parameters["token_embedding"].at[token_id].set(value)
    parts = split_model(MODEL, jax.devices())
    local = build_engine(MODEL, place(MODEL, parameters, parts), SERVING, parts)
    kv: KVManager = local.kv
    service = Orca(
        local.engine,
        kv,
        config=SERVING,
        model=MODEL,
        tokenizer=LETTERS,
        bucket_sizes=default_buckets(SERVING),
        seed=1,
    )
    service.start()
    return service


def with_logprobs(params: SamplingParams) -> SamplingParams:
    return replace(params, max_tokens=8, logprobs=4, prompt_logprobs=2, ignore_eos=True)


def results_next_to(prompt: list[int] | None, params: SamplingParams) -> list[GenerationResult]:
    """The neighbours' results; the poisonous request may end in any allowed way."""
    service = engine()
    poison = None if prompt is None else service.submit(prompt, params)
    others = [
        service.submit(own, with_logprobs(row.params)) for own, row in zip(PROMPTS, neighbours(), strict=True)
    ]
    results = [other.result(SOON) for other in others]
    if poison is not None:
        try:
            result = poison.result(SOON)
        except OutputFailed:  # as where its grammar allows no token of this model
            return results
        logprobs = [*(result.logprobs or ()), *(result.prompt_logprobs or ())]
        assert all(0 <= token_id < VOCAB for token_id in result.token_ids) and result.token_ids
        assert not any(
            math.isnan(value) for token in logprobs for value in (token.logprob, *(v for _, v in token.top))
        )
        assert all(0 <= token_id < VOCAB for token in logprobs for token_id, _ in token.top)
        if params.allowed_token_ids is not None:
            assert set(result.token_ids) <= set(params.allowed_token_ids)
    return results


@cache
def undisturbed() -> list[GenerationResult]:
    return results_next_to(None, SamplingParams())


def outputs(results: list[GenerationResult]) -> list[Any]:
    return [(result.token_ids, result.logprobs, result.prompt_logprobs) for result in results]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(
    st.lists(st.one_of(token_ids, st.sampled_from(sorted(POISONED))), min_size=1, max_size=20),
    sampling_params(),
)
def test_no_request_affects_others_in_the_engine(prompt: list[int], params: SamplingParams) -> None:
    assert outputs(results_next_to(prompt, params)) == outputs(undisturbed())
    assert engine().failure is None


@pytest.mark.parametrize("value", [1e-38, 0.0099, 100.1])
def test_a_penalty_that_would_make_logits_infinite_is_refused(value: float) -> None:
    with pytest.raises(InvalidSamplingParameter, match=r"from 0\.01 to 100"):
        SamplingParams(repetition_penalty=value)
