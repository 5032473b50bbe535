"""Attention sinks of gpt-oss: on every path of attention, over devices and stages, with a prefix cache."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from orca_jax.config import Attention as Path
from orca_jax.config import ParallelConfig, SchedulingConfig, ServingConfig
from orca_jax.families.attention_config import Attention, Scores
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import Embedding, FeedForward, Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.parameters import parameter_table
from orca_jax.families.rotary import Rotary, Scaling
from orca_jax.request.request import Request
from orca_jax.sharding.partition import split_model
from orca_jax.sharding.random_parameters import with_repeated_heads
from tests.device.greedy_reference import GreedyReference
from tests.device.harness import greedy_request, harness
from tests.device.model.drawn_weights import drawn
from tests.device.native.native_form import needs_native

NORM = Norm(kind="rms_norm", eps=1e-5)
YARN = Scaling(kind="yarn", factor=4.0, original_positions=20, truncate=False)
SERVING = ServingConfig(max_batch_size=4, n_slots=4 * 80, max_batch_tokens=64, block_size=8)


def model_of(windows: tuple[int | None, ...]) -> ModelConfig:
    """A layer for each of the windows; eight heads, two of keys and values."""
    layers = [
        Layer(
            attention=Attention(
                n_heads=8,
                n_kv_heads=2,
                head_size=16,
                rotary=Rotary(size=16, base=1.5e5, scaling=YARN),
                scores=Scores(window=window, sinks=True),
            ),
            feed_forward=FeedForward(
                size=24,
                activation="silu",
                gated=True,
                gate_limit=1.5,
                experts=Experts(number=4, top_k=2, scores="softmax_of_chosen", router_bias=True),
            ),
            norm=NORM,
        )
        for window in windows
    ]
    embedding = Embedding(size=32, tied=False)
    return ModelConfig(
        vocab_size=56,
        n_positions=72,
        hidden_size=32,
        layers=tuple(layers),
        embedding=embedding,
        positions=None,
        final_norm=NORM,
    )


MODEL = model_of((9, None))


def weights(model: ModelConfig) -> dict[str, jax.Array]:
    """Random weights whose sinks are as spread as scores."""
    values = drawn(model, 11)
    return {name: 12 * value if name.endswith("sinks") else value for name, value in values.items()}


def requests() -> list[Request]:
    """Requests of which the last three share a prefix with the one before."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 56, n).tolist() for n in (1, 50, 7, 33, 12)]
    prompts += [[*prompts[1][:n], 3, 4] for n in (41, 24, 16)]
    return [greedy_request(str(i), prompt, 9) for i, prompt in enumerate(prompts)]


def check(asked: list[Request], model: ModelConfig, parameters: dict[str, jax.Array]) -> None:
    reference = GreedyReference(model, parameters)
    assert sum(map(reference.sure, asked)) > 0.8 * sum(len(request.output_ids) for request in asked)


def test_sinks_matter() -> None:
    """Without sinks the tokens are different, so the tests below would notice their absence."""
    without = tuple(
        layer.with_attention(scores=replace(attention.scores, sinks=False))
        for layer, attention in zip(MODEL.layers, MODEL.attentions, strict=True)
    )
    asked = requests()
    harness(replace(MODEL, layers=without), weights(MODEL), SERVING, buckets=(64,)).run(asked)
    with pytest.raises(AssertionError):
        check(asked, MODEL, weights(MODEL))


EVERY_OTHER, ALL = (9, None), (5, 9)


@pytest.mark.matrix(but=["windows0-native", "windows2-static"])
@pytest.mark.parametrize(
    ("windows", "path"),
    [
        pytest.param(EVERY_OTHER, "native", marks=needs_native),
        (EVERY_OTHER, "follow_lengths"),
        (EVERY_OTHER, "static"),
        pytest.param(ALL, "native", marks=needs_native),
        pytest.param(ALL, "follow_lengths", marks=pytest.mark.long),
        pytest.param(ALL, "static", marks=pytest.mark.long),
    ],
)
def test_on_every_path_with_chunks_prefixes_and_windows(path: Path, windows: tuple[int | None, ...]) -> None:
    """If all layers have a window, blocks outside it are not read."""
    model = model_of(windows)
    parameters = weights(model)
    serving = replace(SERVING, scheduling=SchedulingConfig(prefill_tokens=11))
    engine = harness(model, parameters, serving, buckets=(8, 64), attention=path)
    asked = requests()
    engine.run(asked, arrivals=[0, 0, 1, 2, 5, 30, 31, 45])
    assert sum(request.n_cached for request in asked) >= 40
    check(asked, model, parameters)


@pytest.mark.matrix(but=["2-2"])
@pytest.mark.parametrize(
    ("n_stages", "tensor"),
    [(2, 2), (1, 4), *(pytest.param(*split, marks=pytest.mark.long) for split in ((1, 2), (2, 1), (1, 8)))],
)
def test_over_devices_and_stages(n_stages: int, tensor: int) -> None:
    """On four devices each key/value head is repeated; on eight each device has one query head."""
    model, parameters = MODEL.for_devices(tensor), weights(MODEL)
    if model.attention.kv_repeats > 1:
        stored = parameter_table(MODEL)
        for name in parameters:
            if any("K" in axis for axis in stored[name].axes):
                parameters[name] = with_repeated_heads(parameters[name], stored[name], model.attention)
    assert {name: value.shape for name, value in parameters.items()} == {
        name: parameter.shape for name, parameter in parameter_table(model).items()
    }
    parallel = ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=tensor)
    parts = split_model(model, jax.devices(), parallel)
    engine = harness(model, parameters, SERVING, buckets=(64,), parts=parts)
    asked = requests()
    engine.run(asked, arrivals=[0, 0, 1, 2, 5, 6, 7, 8])
    check(asked, MODEL, weights(MODEL))
