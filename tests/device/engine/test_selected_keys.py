"""Sparse attention in the engine: whatever the schedule, queries see the keys that the reference selects."""

import random
from collections import Counter
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from orca_jax.config import Attention as AttentionKind
from orca_jax.config import ParallelConfig, Reservation, SchedulingConfig, ServingConfig
from orca_jax.execution.attention_paths import Sparse
from orca_jax.families.attention_config import Indexer, Latent
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import parameter_table
from orca_jax.families.rotary import Rotary
from orca_jax.model import reference
from orca_jax.planning.stage_memory import slot_bytes
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.sharding.partition import split_model
from tests.device.engine.test_hybrid import local_workers
from tests.device.greedy_reference import GreedyReference
from tests.device.harness import greedy_request, harness
from tests.device.model.any_model import SERVING, any_model, check, requests
from tests.device.model.drawn_weights import drawn
from tests.device.model.latent_models import NORM, SIGMOID, dense, latent_model
from tests.device.native.native_form import needs_native
from tests.random_pieces import RandomPieces


def model(top_k: int = 5, *, interleaved: bool = False, latent: Latent | None = None) -> ModelConfig:
    latent = latent or Latent(rank=12, rotary_size=4, plain_size=6, value_size=5, query_rank=10)
    indexer = Indexer(n_heads=6, head_size=latent.rotary_size + 3, top_k=top_k, interleaved=interleaved)
    rotary = Rotary(size=latent.rotary_size, base=500.0, interleaved=True)
    return latent_model(latent, 4, [dense(), dense(8, SIGMOID)], rotary, indexer=indexer)


MODEL = model()
# The last two layers take the keys that the second one selects.
SHARED = replace(
    MODEL,
    layers=(
        *MODEL.layers,
        *(
            layer.with_attention(indexer=replace(layer.attention.indexer, shared=True))
            for layer in MODEL.layers
            if layer.attention is not None and layer.attention.indexer is not None
        ),
    ),
)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    size = st.integers(1, 9)
    latent = Latent(
        rank=draw(st.integers(1, 20)),
        rotary_size=2 * draw(st.integers(1, 4)),
        plain_size=draw(size),
        value_size=draw(size),
        query_rank=draw(size),
        norm=NORM,
    )
    indexer = Indexer(
        n_heads=draw(st.integers(1, 9)),
        head_size=latent.rotary_size + draw(st.integers(0, 9)),
        top_k=draw(st.sampled_from([1, 2, 7, 16, 30, 40, 99])),
        interleaved=draw(st.booleans()),
    )
    kinds = draw(st.lists(st.sampled_from([dense(), dense(12, SIGMOID)]), min_size=1, max_size=3))
    rotary = Rotary(size=latent.rotary_size, base=500.0, interleaved=draw(st.booleans()))
    return latent_model(latent, draw(st.integers(1, 6)), kinds, rotary, indexer=indexer)


@settings(any_model, max_examples=2)
@given(model=models(), seed=st.integers(0, 99))
def test_the_tokens_are_the_references(model: ModelConfig, seed: int) -> None:
    check(model, seed)


@pytest.mark.long
@pytest.mark.timeout(1500)
@settings(any_model, max_examples=20)
@given(model=models(), seed=st.integers(0, 9999))
def test_the_tokens_are_the_references_in_many_models(model: ModelConfig, seed: int) -> None:
    check(model, seed)


@pytest.mark.parametrize(
    "attention", ["follow_lengths", "static", pytest.param("native", marks=needs_native)]
)
def test_every_path_sees_the_same_keys(attention: AttentionKind) -> None:
    """Some rows are shorter than what an indexer selects, and attend densely; others grow past it."""
    latent = Latent(rank=32, rotary_size=16, plain_size=6, value_size=5, query_rank=10)
    own = model(12, interleaved=True, latent=latent)
    parameters = drawn(own, 3)
    engine = harness(own, parameters, SERVING, buckets=(4, 48), attention=attention)
    (worker,) = local_workers(engine).workers
    assert isinstance(worker.attention.path, Sparse) and worker.attention.kind == attention
    assert "beyond 12 keys those that an indexer selects" in worker.attention.description
    asked, arrivals = requests(n=9)
    engine.run(asked, arrivals)
    expected = GreedyReference(own, parameters)
    assert sum(expected.sure(request) for request in asked) > 0.7 * sum(len(r.output_ids) for r in asked)


@pytest.mark.parametrize(("n_stages", "tensor"), [(2, 2), pytest.param(1, 4, marks=pytest.mark.long)])
def test_every_device_selects_the_same_keys(n_stages: int, tensor: int) -> None:
    split = MODEL.for_devices(tensor)
    kept, table = drawn(MODEL, 6), parameter_table(split)
    padded = {
        name: jnp.pad(
            value, [(0, new - old) for new, old in zip(table[name].shape, value.shape, strict=True)]
        )
        for name, value in kept.items()
    }
    parallel = ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=tensor)
    asked, arrivals = requests()
    parts = split_model(split, jax.devices(), parallel)
    harness(split, padded, SERVING, buckets=(48,), parts=parts).run(asked, arrivals)
    expected = GreedyReference(MODEL, kept)
    assert sum(expected.sure(request) for request in asked) > 0.7 * sum(len(r.output_ids) for r in asked)
    # Each device has all compressed vectors, 12 + 4 numbers, and all index keys, 7.
    assert slot_bytes(split, range(2), tensor, 4) == slot_bytes(MODEL, range(2), 1, 4) == 2 * (16 + 7) * 4


@pytest.mark.parametrize("model", [MODEL, SHARED], ids=["own", "shared"])
@pytest.mark.parametrize("attention", ["follow_lengths", "static"])
def test_a_prompts_log_probabilities_are_the_references(model: ModelConfig, attention: AttentionKind) -> None:
    """The last layer runs again for a prompt's tokens, and selects their keys again or is given them."""
    parameters, prompt = drawn(model, 5), [7 * i % 53 for i in range(30)]
    serving = ServingConfig(
        max_batch_size=4, n_slots=4 * 48, max_batch_tokens=11, scheduling=SchedulingConfig()
    )
    sampling = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, prompt_logprobs=0)
    request = Request("scored", tuple(prompt), len(prompt) + 2, sampling, seed=0)
    harness(model, parameters, serving, buckets=(11,), attention=attention).run([request])
    assert request.prompt_logprobs is not None
    found = [record.logprob for record in request.prompt_logprobs]
    logits = reference.forward(model, parameters, jnp.array(prompt))
    expected = jax.nn.log_softmax(logits)[np.arange(29), prompt[1:]]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


# Few slots, so that requests are preempted.
FEW_SLOTS = ServingConfig(max_batch_size=4, n_slots=48, block_size=4, max_batch_tokens=11)
CROWD = tuple((1 + 7 * i % 30, 9, i) for i in range(9))


@dataclass(frozen=True)
class Schedule:
    """Prompts' lengths, outputs' lengths and arrivals, and how they run."""

    requests: tuple[tuple[int, int, int], ...]
    overlap: bool = True
    reservation: Reservation = "on-demand"
    pieces: int | None = None  # the seed of prompts' random pieces
    caching: bool = True


schedules = st.builds(
    Schedule,
    requests=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=9
    ).map(tuple),
    overlap=st.booleans(),
    reservation=st.sampled_from(["full", "on-demand"]),
    pieces=st.none() | st.integers(0, 2**20),
    caching=st.booleans(),
)


@pytest.mark.parametrize(
    ("model", "n_stages", "n_examples"),
    [
        (SHARED, 1, 12),
        pytest.param(MODEL, 1, 400, marks=[pytest.mark.long, pytest.mark.timeout(1500)]),
        pytest.param(SHARED, 1, 200, marks=[pytest.mark.long, pytest.mark.timeout(1500)]),
        pytest.param(MODEL, 2, 60, marks=[pytest.mark.long, pytest.mark.timeout(1500)]),
    ],
)
def test_any_schedule_gives_the_references_tokens(model: ModelConfig, n_stages: int, n_examples: int) -> None:
    """Prompts in pieces at any border, prefixes that are found, preemption and overlap."""
    parameters = drawn(model, 5)
    parts = split_model(model, jax.devices(), ParallelConfig(pipeline_parallel=n_stages))
    workers = local_workers(harness(model, parameters, FEW_SLOTS, buckets=(11,), parts=parts)).workers
    expected = GreedyReference(model, parameters)
    seen: Counter[str] = Counter()

    @settings(max_examples=n_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @example(Schedule(CROWD))
    @example(Schedule(CROWD, pieces=1, overlap=False))
    @example(Schedule(CROWD, pieces=2, caching=False))
    @given(schedules)
    def tokens_are_the_references(schedule: Schedule) -> None:
        scheduling = SchedulingConfig(prefix_caching=schedule.caching, reservation=schedule.reservation)
        serving = replace(FEW_SLOTS, overlap=schedule.overlap, scheduling=scheduling)
        ran = harness(model, {}, serving, buckets=(11,), parts=parts, workers=workers)
        if schedule.pieces is not None:
            ran.scheduler.policy = RandomPieces(ran.scheduler.policy, random.Random(schedule.pieces))
        rng = np.random.default_rng(len(schedule.requests))
        beginning = rng.integers(0, 53, 30).tolist()
        asked: list[Request] = []
        for i, (n_input, n_output, _) in enumerate(schedule.requests):
            n_shared = n_input * (i % 3 + 1) // 3
            prompt = beginning[:n_shared] + rng.integers(0, 53, n_input - n_shared).tolist()
            asked.append(greedy_request(str(i), prompt, n_output))
        ran.run(asked, [arrival for *_, arrival in schedule.requests])
        seen["preempted"] += ran.scheduler.n_preemptions
        seen["found"] += sum(request.n_cached for request in asked)
        seen["sure"] += sum(expected.sure(request) for request in asked)

    tokens_are_the_references()
    assert seen["preempted"] > 0 and seen["found"] > 0 and seen["sure"] > 100, seen
