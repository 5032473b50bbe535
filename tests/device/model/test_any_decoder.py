"""Random decoders of any parts, not only known families: the engine's tokens are the reference's."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.config import ParallelConfig
from orca_jax.families.attention_config import Attention, QKNorm, QKNormOver, Scores, Temperature
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import Embedding, FeedForward, Layer, LearnedPositions, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.rotary import Rotary, Scaling
from orca_jax.sharding.partition import split_model
from orca_jax.sharding.random_parameters import random_parameters
from tests.device.harness import greedy_request, harness
from tests.device.model.any_model import N_POSITIONS, SERVING, VOCABULARY, any_model, check

HEADS = ((4, 4), (4, 2), (4, 1), (6, 2), (3, 1))  # query heads, K/V heads


def norms(*, bias: bool = True) -> st.SearchStrategy[Norm]:
    rms = st.builds(Norm, kind=st.just("rms_norm"), eps=st.just(1e-5), unit_offset=st.booleans())
    layer = st.builds(Norm, bias=st.booleans())
    return st.one_of(rms, layer) if bias else rms


def scalings(size: int) -> st.SearchStrategy[Scaling | None]:
    far: dict[str, Any] = {"factor": 4.0, "original_positions": 10}
    factors = tuple(1.0 + 0.5 * i for i in range(size // 2))
    long: dict[str, Any] = {"short_factors": (1.0,) * (size // 2), "long_factors": factors}
    return st.sampled_from(
        [
            None,
            Scaling(kind="linear", factor=2.0),
            Scaling(kind="dynamic", **far),
            Scaling(kind="yarn", **far),
            Scaling(kind="llama3", **far),
            Scaling(kind="longrope", **far, **long),
        ]
    )


@st.composite
def mixtures(draw: st.DrawFn, bias: bool) -> Experts:
    """Random mixtures in which every expert is chosen by some token; with `bias` experts have biases."""
    maybe = st.booleans()
    n_groups, each = draw(st.sampled_from([(1, 1), (1, 3), (1, 8), (2, 2), (4, 3)]))
    top_groups = draw(st.integers(1, n_groups))
    shared: Any = draw(st.sampled_from([{}, {"shared_size": 12}, {"shared_size": 16, "shared_gate": True}]))
    scores: Any = draw(st.sampled_from(["softmax", "softmax_of_chosen", "sigmoid"]))
    narrow = not bias and draw(maybe)
    own = scores != "softmax_of_chosen"
    return Experts(
        number=n_groups * each,
        top_k=draw(st.integers(1, top_groups * each)),
        scores=scores,
        renormalised=own and draw(maybe),
        multiplier=draw(st.sampled_from([1.0, 2.5])),
        router_bias=draw(maybe),
        correction_bias=own and draw(maybe),
        n_groups=n_groups,
        top_groups=top_groups,
        latent_size=14 if narrow else None,
        **shared,
    )


@st.composite
def feed_forwards(draw: st.DrawFn) -> FeedForward:
    maybe = st.booleans()
    gated = draw(maybe)
    if draw(st.integers(0, 5)) == 0:
        return FeedForward(size=draw(st.sampled_from([16, 24])), activation="xielu", bias=draw(maybe))
    bias = draw(maybe)
    return FeedForward(
        size=draw(st.sampled_from([16, 24])),
        activation=draw(st.sampled_from(["gelu_tanh", "gelu", "relu", "silu", "relu2"])),
        gated=gated,
        bias=bias,
        gate_limit=draw(st.sampled_from([None, 0.8])) if gated else None,
        experts=draw(st.one_of(st.none(), mixtures(bias))),
    )


@st.composite
def layers(draw: st.DrawFn, heads: dict[str, int], norm: Norm) -> Layer:
    """Random layers with these heads."""
    maybe = st.booleans()
    size = draw(st.sampled_from([4, heads["head_size"]]))
    rotary = Rotary(size=size, base=500.0, interleaved=draw(maybe), scaling=draw(scalings(size)))
    over: QKNormOver = draw(st.sampled_from(["head", "width"]))
    scores = Scores(
        scale=draw(st.sampled_from([None, 0.5])),
        window=draw(st.sampled_from([None, 1, 5, 100])),
        soft_cap=draw(st.sampled_from([None, 3.0])),
        alibi=draw(st.sampled_from([None, None, 1.0])),
        sinks=draw(maybe),
        temperature=draw(st.sampled_from([None, Temperature(scale=0.5, step=4)])),
    )
    after = over == "head" and draw(maybe)
    attention = Attention(
        n_heads=heads["n_heads"],
        n_kv_heads=heads["n_kv_heads"],
        head_size=heads["head_size"],
        qkv_bias=draw(maybe),
        out_bias=draw(maybe),
        qk_norm=QKNorm(norm=draw(norms(bias=False)), over=over, after_rotation=after)
        if draw(maybe)
        else None,
        rotary=rotary if draw(maybe) else None,
        scores=scores,
    )
    feed_forward = draw(feed_forwards())
    if draw(st.integers(0, 4)) == 0:  # one part alone
        return Layer(attention=attention, feed_forward=None, norm=norm)
    return Layer(
        attention=attention,
        feed_forward=feed_forward,
        norm=norm,
        residual=draw(st.sampled_from(["pre", "post", "both", "after", "parallel", "parallel_two_norms"])),
        residual_multiplier=draw(st.sampled_from([1.0, 0.7])),
    )


def _feeds(layers: list[Layer]) -> bool:
    return any(layer.feed_forward is not None for layer in layers)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    n_heads, n_kv_heads = draw(st.sampled_from(HEADS))
    heads = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_size": draw(st.sampled_from([6, 16]))}
    norm = draw(norms())
    return ModelConfig(
        vocab_size=VOCABULARY,
        n_positions=N_POSITIONS,
        hidden_size=20,
        layers=tuple(draw(st.lists(layers(heads, norm), min_size=1, max_size=3).filter(_feeds))),
        embedding=Embedding(
            size=draw(st.sampled_from([20, 12])),
            tied=draw(st.booleans()),
            multiplier=draw(st.sampled_from([1.0, 3.0])),
            norm=draw(st.sampled_from([None, norm])),
        ),
        positions=draw(st.sampled_from([None, LearnedPositions(offset=2)])),
        final_norm=draw(st.sampled_from([None, norm])),
        head_bias=draw(st.booleans()),
        logit_multiplier=draw(st.sampled_from([1.0, 0.5])),
        logit_soft_cap=draw(st.sampled_from([None, 20.0])),
    )


@settings(any_model, max_examples=2)
@given(model=models(), seed=st.integers(0, 99))
def test_the_tokens_are_the_references(model: ModelConfig, seed: int) -> None:
    check(model, seed)


@pytest.mark.long
@pytest.mark.timeout(1500)
@settings(any_model, max_examples=12)
@given(model=models(), seed=st.integers(0, 9999))
def test_the_tokens_are_the_references_in_many_models(model: ModelConfig, seed: int) -> None:
    check(model, seed)


@pytest.mark.parametrize("after_rotation", [False, True])
def test_more_devices_than_kv_heads(after_rotation: bool) -> None:
    """Each device has a copy of its query heads' K/V head; the weights are the same."""
    norm = Norm(kind="rms_norm", eps=1e-5)
    feed_forward = FeedForward(size=16, gated=True)
    scores, over = Scores(alibi=1.0, window=7, sinks=True), "width"
    if after_rotation:
        feed_forward = FeedForward(size=16, activation="xielu")
        scores, over = Scores(temperature=Temperature(scale=0.5, step=4)), "head"
    own = Attention(
        n_heads=8,
        n_kv_heads=2,
        head_size=8,
        qkv_bias=True,
        qk_norm=QKNorm(norm=norm, over=over, after_rotation=after_rotation),
        rotary=Rotary(size=8),
        scores=scores,
    )
    layer = Layer(attention=own, feed_forward=feed_forward, norm=norm)
    embedding = Embedding(size=24)
    model = ModelConfig(
        vocab_size=53,
        n_positions=40,
        hidden_size=24,
        layers=(layer,),
        embedding=embedding,
        final_norm=norm,
    )
    split = model.for_devices(4)
    assert (split.n_kv_heads, split.attention.group, split.attention.kv_repeats) == (4, 2, 2)
    assert split.with_kv_heads(1) == model.for_devices(4).with_kv_heads(1)
    (part,) = split_model(split, jax.devices(), ParallelConfig(tensor_parallel=4))
    (whole,) = split_model(model, jax.devices())
    dtype = jnp.dtype("float32")
    tokens: list[dict[str, list[int]]] = []
    for config, where in ((model, whole), (split, part)):
        parameters = random_parameters(config, 3, dtype, where.placement(config))
        # Scores must matter: the initial deviation is small.
        wide = {name: 12 * value if value.ndim > 1 else value for name, value in parameters.items()}
        engine = harness(config, wide, SERVING, buckets=(48,), parts=(where,))
        requests = [greedy_request(str(n), [7 * i % 53 for i in range(n)], 6) for n in (1, 30)]
        tokens.append(engine.run(requests))
    assert tokens[0] == tokens[1]
