"""Engines whose caches hold eight bits: the tokens are those of model/reference.py with the same rounding."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orca_jax.config import Attention, ParallelConfig, SchedulingConfig, ServingConfig
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.errors import ConfigError
from orca_jax.execution.worker import LocalWorkers, Worker
from orca_jax.families.attention_config import KVCode
from orca_jax.families.presets import PRESETS
from orca_jax.model import reference
from orca_jax.model.transformer import init_parameters
from orca_jax.request.request import Request
from orca_jax.sharding.partition import StagePart, split_model
from tests.device.greedy_reference import GreedyReference
from tests.device.harness import Harness, greedy_request, harness
from tests.device.native.native_form import has_native
from tests.gpt_config import gpt_config

MODEL = gpt_config(
    vocab_size=101, n_positions=64, hidden_size=64, n_layers=2, n_heads=4, ffn_size=40, vocab_multiple=4
)
KINDS: list[tuple[KVCode, Attention]] = [
    ("int8", "follow_lengths"),
    ("fp8", "static"),
    *((("int8", "native"), ("fp8", "native")) if has_native() else ()),
]
SCHEDULES = [
    SchedulingConfig(prefill_tokens=5),  # with prefix cache, chunks and preemption
    SchedulingConfig(prefill_tokens=16, prefix_caching=False),
    SchedulingConfig(chunked_prefill=False, reservation="full"),
]
SERVING = ServingConfig(max_batch_size=4, n_slots=112, max_batch_tokens=64, block_size=8)
BUCKETS = (4, 16, 64)
# Sums in another order may move a number to the next code, which moves logits by less than this.
MARGIN = 0.1


@cache
def parameters() -> dict[str, jax.Array]:
    """Random weights, spread so that tokens vary and choices are sure."""
    p = init_parameters(MODEL, jax.random.key(3), jnp.float32)
    return {name: value * (1 if value.ndim == 1 else 12) for name, value in p.items()}


@cache
def engine(
    code: KVCode, attention: Attention, split: int
) -> tuple[tuple[StagePart, ...], tuple[Worker, ...]]:
    """The stages and workers of an engine with `split` stages of `split` devices."""
    model = MODEL.with_kv_code(code)
    parallel = ParallelConfig(pipeline_parallel=split, tensor_parallel=split)
    parts = split_model(model, jax.devices(), parallel)
    ran = harness(model, parameters(), SERVING, buckets=BUCKETS, parts=parts, attention=attention)
    return parts, workers_of(ran)


def workers_of(ran: Harness) -> tuple[Worker, ...]:
    assert isinstance(ran.scheduler.engine, EngineMaster)
    assert isinstance(ran.scheduler.engine._workers, LocalWorkers)
    return ran.scheduler.engine._workers.workers


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[Request], list[int]]:
    stem = tuple(range(3, 23))
    drawn: list[Request] = []
    for i in range(draw(st.integers(2, 7))):
        tail = draw(st.lists(st.integers(0, 100), min_size=1, max_size=14))
        prompt = (*(stem if draw(st.booleans()) else ()), *tail)
        drawn.append(greedy_request(str(i), prompt, draw(st.integers(1, 24))))
    return drawn, [draw(st.integers(0, 10)) for _ in drawn]


def outputs_are_sure(
    asked: tuple[list[Request], list[int]], code: KVCode, attention: Attention, split: int, scheduling: int
) -> None:
    model = MODEL.with_kv_code(code)
    parts, workers = engine(code, attention, split)
    serving = replace(SERVING, scheduling=SCHEDULES[scheduling])
    harness(model, {}, serving, buckets=BUCKETS, parts=parts, workers=workers).run(*asked)
    for request in asked[0]:
        GreedyReference(model, parameters()).sure(request, MARGIN)


@pytest.mark.parametrize(
    ("code", "attention"),
    [pytest.param(*kind, marks=pytest.mark.long if kind[0] == "int8" else ()) for kind in KINDS],
)
def test_tokens_are_the_references_whatever_the_schedule(code: KVCode, attention: Attention) -> None:
    @settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(asked=requests(), scheduling=st.integers(0, len(SCHEDULES) - 1))
    def outputs(asked: tuple[list[Request], list[int]], scheduling: int) -> None:
        outputs_are_sure(asked, code, attention, 1, scheduling)

    outputs()


def test_stages_of_several_devices_give_the_same_tokens() -> None:
    rng = np.random.default_rng(0)
    asked = [greedy_request(str(i), rng.integers(0, 101, 5 + 7 * i).tolist(), 20) for i in range(5)]
    code, attention = KINDS[-1]
    outputs_are_sure((asked, [0, 0, 1, 3, 5]), code, attention, 2, 0)


def test_rounding_changes_logits_and_not_by_much() -> None:
    """So that the tests above could not pass without it."""
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 101, 64))
    exact = reference.forward(MODEL, parameters(), ids)
    bounds: list[tuple[KVCode, float]] = [("int8", 0.02), ("fp8", 0.15)]
    for code, most in bounds:
        held = reference.forward(MODEL.with_kv_code(code), parameters(), ids)
        error = float(jnp.sqrt(((held - exact) ** 2).mean() / exact.var()))
        assert most / 50 < error < most, (code, error)


@pytest.mark.parametrize(
    "attention",
    [
        *(["native"] if has_native() else []),
        pytest.param("follow_lengths", marks=pytest.mark.long if has_native() else ()),
    ],
)
def test_a_deterministic_engine_gives_the_same_bits_alone_and_among_others(attention: Attention) -> None:
    model = MODEL.with_kv_code("int8")
    scheduling = SchedulingConfig(chunked_prefill=False, prefix_caching=False, reservation="full")
    serving = replace(SERVING, deterministic=True, scheduling=scheduling)
    parts = split_model(model, jax.devices())
    workers = workers_of(
        harness(model, parameters(), serving, buckets=BUCKETS, parts=parts, attention=attention)
    )
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 101, n).tolist() for n in (1, 9, 30, 17)]

    def run(chosen: list[int]) -> dict[str, list[int]]:
        asked = [greedy_request(str(i), prompts[i], 20) for i in chosen]
        ran = harness(model, {}, serving, buckets=BUCKETS, parts=parts, workers=workers)
        return ran.run(asked)

    together = run([0, 1, 2, 3])
    assert {str(i): run([i])[str(i)] for i in range(4)} == together


def test_latent_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'int8', and latent attention keeps one"):
        PRESETS["deepseek-v3"].with_kv_code("int8")
