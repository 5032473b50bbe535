"""Layers that take the keys and values of others, of heads, values and inputs of their own (Gemma 4)."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.config import ParallelConfig, SchedulingConfig, ServingConfig
from orca_jax.errors import ConfigError
from orca_jax.families.attention_config import Attention, QKNorm
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import Embedding, FeedForward, Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.rotary import Rotary
from orca_jax.model import reference
from orca_jax.planning.stage_layers import check_split
from orca_jax.planning.stage_memory import slot_bytes
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.sharding.partition import split_model
from tests.device.harness import greedy_request, harness
from tests.device.model.any_model import N_POSITIONS, VOCABULARY, check
from tests.device.model.drawn_weights import drawn

NORM = Norm(kind="rms_norm", eps=1e-5)
DENSE = FeedForward(size=24, activation="gelu_tanh", gated=True, bias=False)
MIXED = FeedForward(
    size=10,
    activation="gelu_tanh",
    gated=True,
    bias=False,
    experts=Experts(
        number=4, top_k=2, renormalised=True, router_norm=1e-5, router_multiplier=0.3, scaled=True
    ),
)


def layer(head_size: int, n_kv_heads: int, *, window: int | None = None, **other: Any) -> Layer:
    own = Attention(
        n_heads=4,
        n_kv_heads=n_kv_heads,
        head_size=head_size,
        qkv_bias=False,
        out_bias=False,
        qk_norm=QKNorm(norm=NORM),
        rotary=Rotary(size=head_size, base=500.0, n_turned=None if window else head_size // 4),
        **{"value_norm": 1e-5, **other},
    )
    found = Layer(attention=own, feed_forward=DENSE, norm=NORM, residual="both", input_size=6, scalar=True)
    return found if window is None else found.with_window(window)


def taking(source: int, found: Layer) -> Layer:
    """A layer that takes the keys and values of another one."""
    return found.with_attention(kv_from=source, value_norm=None, values_are_keys=False)


NEAR, FAR = layer(8, 4, window=5), layer(16, 2, values_are_keys=True)
MODEL = ModelConfig(
    vocab_size=VOCABULARY,
    n_positions=N_POSITIONS,
    hidden_size=20,
    layers=(
        NEAR,
        replace(FAR, beside=MIXED),
        taking(0, NEAR).with_feed_forward(size=32),
        taking(1, FAR),
    ),
    embedding=Embedding(size=20, multiplier=4.0),
    positions=None,
    final_norm=NORM,
    logit_soft_cap=20.0,
)


def test_the_tokens_are_the_references() -> None:
    check(MODEL, 3)


def test_a_prompts_log_probabilities_are_the_references() -> None:
    """Prompts pass the last layer after the forward pass, with the layer's input and another's keys."""
    parameters, prompt = drawn(MODEL, 5), [7 * i % VOCABULARY for i in range(30)]
    scheduling = SchedulingConfig()
    serving = ServingConfig(max_batch_size=4, n_slots=4 * 48, max_batch_tokens=11, scheduling=scheduling)
    sampling = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, prompt_logprobs=0)
    request = Request("scored", tuple(prompt), len(prompt) + 2, sampling, seed=0)
    harness(MODEL, parameters, serving, buckets=(11,)).run([request])
    assert request.prompt_logprobs is not None
    found = [record.logprob for record in request.prompt_logprobs]
    logits = reference.forward(MODEL, parameters, jnp.array(prompt))
    expected = jax.nn.log_softmax(logits)[np.arange(29), prompt[1:]]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.matrix
def test_two_devices_give_the_same_tokens() -> None:
    parameters = drawn(MODEL, 5)
    serving = ServingConfig(max_batch_size=2, n_slots=2 * 48, max_batch_tokens=48)
    tokens: list[dict[str, list[int]]] = []
    for n in (1, 2):
        model = MODEL.for_devices(n)
        parts = split_model(model, jax.devices(), ParallelConfig(tensor_parallel=n))
        padded = {
            name: jnp.pad(value, [(0, model.padded_vocab_size - VOCABULARY), (0, 0)])
            if name in ("token_embedding", "inputs.embedding")
            else value
            for name, value in parameters.items()
        }
        requests = [greedy_request(str(k), [5 * i % VOCABULARY for i in range(k)], 6) for k in (1, 30)]
        tokens.append(harness(model, padded, serving, buckets=(48,), parts=parts).run(requests))
    assert tokens[0] == tokens[1]


def test_layers_with_anothers_keys_take_no_memory() -> None:
    every = slot_bytes(MODEL, range(4), 1, 2)
    assert every == slot_bytes(MODEL, range(2), 1, 2) == 2 * (2 * 4 * 8 + 2 * 2 * 16)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (MODEL, "layers have inputs of their own, which the first stage alone has"),
        (
            replace(MODEL, layers=tuple(replace(each, input_size=None) for each in MODEL.layers)),
            "layer 2 takes the keys and values of layer 0, which would be on an earlier stage",
        ),
    ],
)
def test_stages_that_lack_something_are_refused(model: ModelConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_split(model, ParallelConfig(pipeline_parallel=2))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((taking(0, NEAR), NEAR), "takes the keys and values of layer 0, which must be an earlier layer"),
        (
            (NEAR, taking(0, NEAR), taking(1, NEAR)),
            "layer 2 takes the keys and values of layer 1, which must",
        ),
        ((NEAR, taking(0, FAR)), "layer 1 takes the keys and values of layer 0, whose heads differ"),
        ((NEAR, replace(FAR, input_size=4)), "layers whose inputs have different sizes"),
    ],
)
def test_layers_that_do_not_fit_are_refused(layers: tuple[Layer, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(MODEL, layers=layers)


def test_heads_that_differ_are_shared_only_where_each_can_be() -> None:
    with pytest.raises(ConfigError, match="layers have 2 and 4 key/value heads"):
        MODEL.for_devices(4)
