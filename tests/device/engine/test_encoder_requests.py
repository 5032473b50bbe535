"""Requests of models with an encoder, mixed at random: the tokens are the reference's."""

from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from orca_jax.config import ORCA, ParallelConfig, SchedulingConfig, ServingConfig
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.execution.worker import LocalWorkers, Worker
from orca_jax.families.attention_config import Attention, RelativeBias, Scores
from orca_jax.families.model_config import (
    Embedding,
    Encoder,
    FeedForward,
    Layer,
    LearnedPositions,
    ModelConfig,
)
from orca_jax.families.norm_config import Norm
from orca_jax.model import reference
from orca_jax.model.transformer import init_parameters
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.restart import run_again
from orca_jax.sharding.partition import StagePart, split_model
from tests.device.harness import harness

MAX_INPUT, MAX_OUTPUT, VOCAB, END = 24, 12, 66, 1
SERVING = ServingConfig(max_batch_size=3, n_slots=160, max_batch_tokens=48, block_size=8)
# Without a prefix cache, as every engine of such a model.
ON_DEMAND = SchedulingConfig(prefix_caching=False, prefill_tokens=20)
POLICIES = {
    "orca": ORCA,
    "on demand": ON_DEMAND,
    "priority": replace(ON_DEMAND, scheduling_policy="priority"),
}


def _attention(*, causal: bool, relative: bool, bias: bool) -> Attention:
    scores = Scores(scale=1.0, relative=RelativeBias(n_buckets=8, max_distance=16) if relative else None)
    return Attention(
        n_heads=2, n_kv_heads=2, head_size=16, qkv_bias=bias, out_bias=bias, causal=causal, scores=scores
    )


def _model(*, like_t5: bool) -> ModelConfig:
    """A model like T5 (relative bias, pre-norm) or like BART (learned positions, post-norm)."""
    norm = Norm(kind="rms_norm", eps=1e-6) if like_t5 else Norm()
    attention = partial(_attention, bias=not like_t5)
    feed_forward = FeedForward(size=40, activation="relu", gated=like_t5, bias=not like_t5)
    layer = partial(Layer, feed_forward=feed_forward, norm=norm, residual="pre" if like_t5 else "post")
    decoding = layer(
        attention=attention(causal=True, relative=like_t5), cross=attention(causal=False, relative=False)
    )
    learned = None if like_t5 else LearnedPositions(offset=2)
    around = norm if like_t5 else None
    return ModelConfig(
        vocab_size=VOCAB,
        n_positions=MAX_OUTPUT + 4,
        hidden_size=24,
        layers=(decoding,) * 2,
        embedding=Embedding(size=24, norm=None if like_t5 else norm),
        positions=learned,
        final_norm=around,
        head_bias=not like_t5,
        eos_token_ids=(END,),
        encoder=Encoder(
            layers=(layer(attention=attention(causal=False, relative=like_t5)),) * 3,
            n_positions=MAX_INPUT,
            positions=learned,
            embedding_norm=None if like_t5 else norm,
            final_norm=around,
        ),
        decoder_start_token_id=0,
    )


MODELS = {"t5": _model(like_t5=True), "bart": _model(like_t5=False)}
MODELS["t5, int8 cache"] = MODELS["t5"].with_kv_code("int8")


@cache
def parameters(name: str) -> dict[str, jax.Array]:
    """Random weights, spread so that tokens vary and choices are sure."""
    p = init_parameters(MODELS[name], jax.random.key(3), jnp.float32)
    return {name: value * (1 if value.ndim == 1 else 9) for name, value in p.items()}


@cache
def stages(name: str, n_stages: int, n_devices: int) -> tuple[tuple[StagePart, ...], tuple[Worker, ...]]:
    model = MODELS[name]
    parallel = ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=n_devices)
    parts = split_model(model, jax.devices(), parallel)
    engine = harness(model, parameters(name), SERVING, buckets=(3, 48), parts=parts).scheduler.engine
    assert isinstance(engine, EngineMaster)
    assert isinstance(engine._workers, LocalWorkers)
    return parts, engine._workers.workers


@cache
def _logits(name: str):
    model, weights = MODELS[name], parameters(name)

    @jax.jit
    def logits(token_ids: jax.Array, encoder_ids: jax.Array) -> jax.Array:
        return reference.forward(model, weights, token_ids, encoder_ids)

    return logits


@cache
def expected(name: str, encoder_ids: tuple[int, ...], prompt: tuple[int, ...], n_output: int) -> list[int]:
    """The greedy tokens of the reference. Padding at the end does not affect its causal decoder."""
    known, read = np.zeros(MAX_OUTPUT + 4, np.int32), np.full(MAX_INPUT, -1, np.int32)
    known[: len(prompt)], read[: len(encoder_ids)] = prompt, encoder_ids
    n = len(prompt)
    output: list[int] = []
    while len(output) < n_output and END not in output:
        token = int(_logits(name)(jnp.asarray(known), jnp.asarray(read))[n - 1].argmax())
        known[n], n = token, n + 1
        output.append(token)
    return output


@dataclass(frozen=True)
class Planned:
    """A request that arrives before a step, and is cancelled before a later one (0: never)."""

    arrival: int
    encoder_ids: tuple[int, ...]
    prompt: tuple[int, ...]
    n_output: int
    cancelled: int
    priority: int


token = st.integers(2, VOCAB - 1)
# A few inputs, so that the reference is asked the same again.
inputs = [tuple(np.random.default_rng(i).integers(2, VOCAB, n).tolist()) for i, n in enumerate((1, 7, 8, 24))]
plans = st.lists(
    st.builds(
        Planned,
        arrival=st.integers(0, 8),
        encoder_ids=st.sampled_from(inputs),
        prompt=st.sampled_from([(0,), (0, 9, 4)]),
        n_output=st.integers(1, MAX_OUTPUT),
        cancelled=st.sampled_from([0, 0, 0, 3, 7]),
        priority=st.integers(-1, 1),
    ),
    min_size=1,
    max_size=7,
)


# An iteration has room for two of these inputs.
LONG_INPUTS = [Planned(0, inputs[3], (0,), 3 + i, 0, 0) for i in range(3)]


@pytest.mark.matrix(but=["t5-1-1", "t5, int8 cache-2-1"])
@pytest.mark.parametrize(
    ("name", "n_stages", "n_devices"),
    [
        ("t5", 1, 1),
        ("bart", 2, 2),
        ("t5, int8 cache", 2, 1),
        pytest.param("t5", 2, 2, marks=pytest.mark.long),
        pytest.param("bart", 1, 1, marks=pytest.mark.long),
    ],
)
def test_tokens_are_the_reference_s_whatever_the_schedule(name: str, n_stages: int, n_devices: int) -> None:
    @settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @example(planned=LONG_INPUTS, policy="on demand", overlap=True, lost_before=4)
    @example(planned=LONG_INPUTS, policy="orca", overlap=True, lost_before=-1)
    @given(
        planned=plans,
        policy=st.sampled_from(sorted(POLICIES)),
        overlap=st.booleans(),
        lost_before=st.integers(-1, 12),
    )
    def outputs_are_the_reference_s(
        planned: list[Planned], policy: str, overlap: bool, lost_before: int
    ) -> None:
        parts, workers = stages(name, n_stages, n_devices)
        serving = replace(SERVING, overlap=overlap, scheduling=POLICIES[policy])
        ran = harness(MODELS[name], {}, serving, buckets=(3, 48), parts=parts, workers=workers)
        sampling = SamplingParams(temperature=0.0)
        requests = [
            Request(
                str(i),
                plan.prompt,
                len(plan.prompt) + plan.n_output,
                sampling,
                seed=0,
                end_token_ids=frozenset({END}),
                encoder_ids=plan.encoder_ids,
                priority=plan.priority if policy == "priority" else 0,
            )
            for i, plan in enumerate(planned)
        ]

        def before_step(step: int) -> None:
            for plan, request in zip(planned, requests, strict=True):
                if plan.cancelled and step == plan.arrival + plan.cancelled:
                    ran.pool.end(request, FinishReason.CANCELLED)
            if step == lost_before:  # all caches, the encoders' results among them
                for worker in workers:
                    worker.renew()
                run_again(ran.scheduler)

        ran.run(requests, [plan.arrival for plan in planned], before_step)
        for plan, request in zip(planned, requests, strict=True):
            wanted = expected(name, plan.encoder_ids, plan.prompt, plan.n_output)
            assert request.output_ids == wanted[: len(request.output_ids)]
            if request.finish_reason is not FinishReason.CANCELLED:
                assert len(request.output_ids) == len(wanted)

    outputs_are_the_reference_s()


def test_an_iteration_holds_encoders_and_decoders_together() -> None:
    """Only a request's first iteration runs the encoder."""
    parts, workers = stages("t5", 1, 1)
    ran = harness(MODELS["t5"], {}, SERVING, buckets=(3, 48), parts=parts, workers=workers)
    assert isinstance(ran.scheduler.engine, EngineMaster)
    local = ran.scheduler.engine._workers
    assert isinstance(local, LocalWorkers)
    seen: list[tuple[int, list[bool]]] = []
    issue = local.issue

    def watched(message, words):
        seen.append((len(message.encoder.token_ids), message.encodes.tolist()))
        return issue(message, words)

    local.issue = watched
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    requests = [
        Request(str(i), (0,), 1 + 4, sampling, seed=0, encoder_ids=ids) for i, ids in enumerate(inputs[1:3])
    ]
    ran.run(requests, [0, 1])
    assert seen[:3] == [(7, [True]), (8, [False, True]), (0, [False, False])]
    assert ran.kv.n_free_blocks == ran.kv.n_blocks
