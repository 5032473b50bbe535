"""Packed weights: their numbers, to the bit, and a model's tokens with weights in each form.

The truth for tokens is the dense reference with the unpacked numbers.
"""

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.checkpoint.directory import put_in_form
from orca_jax.checkpoint.shard_reader import ComputedArray, Parts, Source
from orca_jax.config import ParallelConfig, ServingConfig
from orca_jax.errors import ConfigError, UnevenBlocks
from orca_jax.execution.worker import Worker
from orca_jax.families.config_json import (
    config_from_json,
    config_to_json,
    forms_to_json,
    plain_error,
    with_forms_of_json,
)
from orca_jax.families.hf_config import model_of
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.packed_form import (
    Q4_0,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_0,
    Joined,
    PackedForm,
    joined,
    w4,
    w8,
)
from orca_jax.families.parameters import packable_weights, parameter_table, stage_bytes
from orca_jax.families.weight_form import DENSE, WeightForm
from orca_jax.launch.local_memory import LocalMemory
from orca_jax.model import packed_weight
from orca_jax.model.layers import matmul
from orca_jax.model.packed_weight import encoded_planes, half_power, unpacked
from orca_jax.model.transformer import init_parameter
from orca_jax.model.weight import PackedWeight
from orca_jax.planning.sizes import engine_shape
from orca_jax.planning.stage_layers import check_split
from orca_jax.sharding.partition import StagePart
from tests.device.greedy_reference import GreedyReference
from tests.device.harness import harness
from tests.device.model.drawn_weights import drawn
from tests.device.model.formed_models import device_bytes, requests, stages
from tests.device.model.golden import MARGIN
from tests.device.native.native_form import needs_native
from tests.packed_planes import EVERY_FORM, literal_numbers, random_planes

pytestmark = pytest.mark.usefixtures("whole_activations")

SERVING = ServingConfig(max_batch_size=4, n_slots=256, max_batch_tokens=64)
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 211,
    "max_position_embeddings": 96,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MIXTURE: dict[str, Any] = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("form", EVERY_FORM.values(), ids=EVERY_FORM)
def test_the_numbers_are_those_that_the_form_describes(form: PackedForm) -> None:
    planes = random_planes(form, (5, 512), 0)
    found = jax.jit(lambda planes: unpacked(form, planes, np.float32))(planes)
    expected = literal_numbers(form, planes)
    assert 0.01 < np.abs(expected).mean() < 0.2
    np.testing.assert_array_equal(found, expected)


def formed(model: ModelConfig, form: WeightForm) -> ModelConfig:
    """The model with all that can be packed in the form, but the values of layer 0 in another."""
    forms = dict.fromkeys(packable_weights(model), form)
    forms["layers.0.qkv.weight"] = joined((form, form, Q8_0))
    return model.with_forms(forms)


def random_arrays(form: WeightForm, shape: tuple[int, ...], seed: int) -> dict[str, np.ndarray]:
    if isinstance(form, PackedForm):
        return random_planes(form, shape, seed)
    assert isinstance(form, Joined)
    sizes = [shape[0] - len(form.forms) + 1, *[1] * (len(form.forms) - 1)]
    return {
        f"{i}.{name}": plane
        for i, (own, n) in enumerate(zip(form.forms, sizes, strict=True))
        for name, plane in random_arrays(own, (n, *shape[1:]), seed + i).items()
    }


def numbers_of(form: WeightForm, arrays: Mapping[str, Any]) -> np.ndarray:
    if isinstance(form, PackedForm):
        return np.asarray(
            unpacked(form, {name: jnp.asarray(one) for name, one in arrays.items()}, np.float32)
        )
    assert isinstance(form, Joined)
    parts = [
        numbers_of(own, {name[2:]: array for name, array in arrays.items() if name.startswith(f"{i}.")})
        for i, own in enumerate(form.forms)
    ]
    return np.concatenate(parts)


def in_our_order(model: ModelConfig, name: str, value: np.ndarray) -> np.ndarray:
    """A dense weight; the output projection's inputs are in the checkpoint's order."""
    if not name.endswith(".out.weight"):
        return value
    attention = model.attention
    by_head = value.reshape(len(value), attention.n_kv_heads, attention.group, attention.head_size)
    return by_head.swapaxes(1, 2).reshape(len(value), attention.group, -1)


def random_weights(model: ModelConfig) -> tuple[dict[str, Source], dict[str, jax.Array]]:
    """Draw weights: as a formed model reads each of them, and the same weights for the reference."""
    dense = drawn(model.with_forms({}), 1)
    sources: dict[str, Source] = {}
    for i, (name, one) in enumerate(parameter_table(model).items()):
        if one.form == DENSE:
            values = np.asarray(dense[name]).reshape(one.stacked_shape)
            sources[name] = Parts((ComputedArray(name, values),))
            continue
        arrays = random_arrays(one.form, one.shape, i)
        sources[name] = {
            key: Parts((ComputedArray(name, _stacked(one.form, key, array)),))
            for key, array in arrays.items()
        }
        dense[name] = jnp.asarray(in_our_order(model, name, numbers_of(one.form, arrays)))
    return sources, dense


def _stacked(form: WeightForm, key: str, array: np.ndarray) -> np.ndarray:
    by_row = getattr(form, "block", 0) is None and key in ("scales", "zeros")
    return array.reshape(-1) if by_row else array.reshape(-1, array.shape[-1])


def loaded(
    model: ModelConfig, sources: Mapping[str, Source], parts: tuple[StagePart, ...]
) -> list[dict[str, Any]]:
    table = parameter_table(model)
    return [
        {
            name: put_in_form(sources[name], table[name], np.dtype(np.float32), [place])[0]
            for name, place in part.placement(model).items()
        }
        for part in parts
    ]


def check_tokens(
    fields: dict[str, Any], form: WeightForm, n_stages: int = 1, tensor: int = 1, margin: float = MARGIN
) -> None:
    """The engine's greedy tokens are the reference's, and the loaded bytes are the planned ones."""
    stored = formed(model_of(fields), form)
    sources, dense = random_weights(stored)
    model = stored.for_devices(tensor)
    parts = stages(n_stages, tensor, model)
    weights = loaded(model, sources, parts)
    for part, own in zip(parts, weights, strict=True):
        assert device_bytes(own) == stage_bytes(model, part.layers, tensor, 4)
    asked = requests()
    merged = {name: weight for own in weights for name, weight in own.items()}
    harness(model, merged, SERVING, buckets=(64,), parts=parts).run(asked)
    reference = GreedyReference(stored.with_forms({}), dense)
    assert sum(reference.sure(request, margin) for request in asked) > (12 if margin == MARGIN else 0)


FORMS = {name: form for name, form in EVERY_FORM.items() if not form.integer_inputs}


def test_powers_of_two_are_exact_down_to_the_subnormal_ones() -> None:
    # Compared as bits: arithmetic on a CPU would flush the first two to zero.
    found = np.asarray(half_power(jnp.arange(256, dtype=jnp.uint8)))
    wanted = np.ldexp(np.float64(1), np.arange(256) - 128).astype(np.float32)
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.matrix(but=["Q4_1", "Q6_K", "MXFP4", "w4-zeros", "fp8-blocks"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_tokens_are_those_of_the_unpacked_weights(form: PackedForm) -> None:
    tied = form in (Q4_K, w8(None, scale="float32"))
    check_tokens({**LLAMA, "num_hidden_layers": 1, "tie_word_embeddings": tied}, form)


@needs_native
@pytest.mark.parametrize("fields", [LLAMA, MIXTURE], ids=["llama", "mixture"])
def test_tokens_with_activations_rounded_in_c(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    form = Q6_K if fields is MIXTURE else Q4_K
    check_tokens({**fields, "num_hidden_layers": 1, "tie_word_embeddings": True}, form, margin=0.1)


@pytest.mark.matrix(but=["Q4_K-2-1", "w8-1-2"])
@pytest.mark.parametrize(("n_stages", "tensor"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_stages_and_devices_share_packed_weights(form: PackedForm, n_stages: int, tensor: int) -> None:
    check_tokens({**LLAMA, "tie_word_embeddings": True}, form, n_stages, tensor)


@pytest.mark.matrix(but=["Q6_K-2"])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("form", [Q6_K, w4(32)], ids=["Q6_K", "w4"])
def test_experts_stay_packed(form: PackedForm, tensor: int) -> None:
    check_tokens({**MIXTURE, "num_hidden_layers": 1}, form, 1, tensor)


@pytest.mark.parametrize("form", EVERY_FORM.values(), ids=EVERY_FORM)
def test_a_product_by_parts_is_the_product_with_the_numbers(
    form: PackedForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weight, "_PART_BYTES", 7 * 512 * 4)
    planes = random_planes(form, (3, 10, 512), 0)
    x = np.random.default_rng(1).standard_normal((4, 512)).astype(np.float32)
    found = jax.jit(lambda x, planes: PackedWeight(form, planes).product(x, matmul))(x, planes)
    if form.integer_inputs:
        scale = np.abs(x).max(axis=1, keepdims=True) / 127
        x = np.rint(x / scale) * scale
    np.testing.assert_allclose(found, x @ numbers_of(form, planes).reshape(30, 512).T, atol=2e-4)


@pytest.mark.matrix(but=["Q4_K", "Q5_0", "IQ4_NL", "MXFP4", "w4-zeros", "fp8-blocks", "w8a8"])
@pytest.mark.parametrize("form", EVERY_FORM.values(), ids=EVERY_FORM)
def test_dense_weights_are_rounded_to_nearest(form: PackedForm) -> None:
    dense = np.random.default_rng(0).standard_normal((3, 5, 512)).astype(np.float32)
    dense[0, 1] = 0
    planes = jax.jit(lambda dense: encoded_planes(form, dense))(dense)
    expected = {name: (array.shape, array.dtype) for name, array in form.arrays(dense.shape, "f4").items()}
    assert {name: (plane.shape, plane.dtype) for name, plane in planes.items()} == expected
    numbers = numbers_of(form, planes)
    assert not numbers[0, 1].any()
    most = {4: 0.13, 5: 0.06, 6: 0.03, 8: 0.03 if form.code == "fp8" else 0.012}[form.bits]
    most = 0.2 if form.scale == "e8m0" else most
    error = np.sqrt(np.square(numbers - dense).sum() / np.square(dense).sum())
    assert most / 4 < error < most
    again = encoded_planes(form, jnp.asarray(numbers))
    assert np.abs(numbers_of(form, again) - numbers).max() < 0.1 * np.abs(dense).max()


@pytest.mark.matrix(but=["Q5_K-1", "w4-2"])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("form", [w4(32), Q5_K], ids=["w4", "Q5_K"])
def test_weights_are_rounded_as_they_arrive_and_sleep(form: PackedForm, tensor: int) -> None:
    dense = model_of({**LLAMA, "num_hidden_layers": 1})
    stored = dense.with_forms(dict.fromkeys(packable_weights(dense), form))
    model = stored.for_devices(tensor)
    (part,) = stages(1, tensor, model)
    shape = engine_shape(model, SERVING, n_workers=1)
    worker = Worker(model, loaded(model, random_weights(stored)[0], (part,))[0], shape, part)
    memory = LocalMemory([worker], stored=stored, model=model, dtype=jnp.dtype("float32"))
    kinds = [(array.dtype, array.shape, array.sharding) for array in worker.stage.weights]
    new = drawn(dense, 2)
    memory.prepare(new, cast=False, lora_scale=1.0)()
    rounded = dict(new)
    for name in packable_weights(dense):
        value = np.asarray(new[name])
        if name.endswith(".out.weight"):
            by_head = value.reshape(len(value), 4, 2, 64).swapaxes(1, 2).reshape(len(value), -1)
            value = numbers_of(form, encoded_planes(form, jnp.asarray(by_head)))
            rounded[name] = jnp.asarray(in_our_order(dense, name, value))
        else:
            rounded[name] = jnp.asarray(numbers_of(form, encoded_planes(form, jnp.asarray(value))))

    def check() -> None:
        asked = requests()
        harness(model, {}, SERVING, buckets=(64,), parts=(part,), workers=[worker]).run(asked)
        assert sum(GreedyReference(dense, rounded).sure(request) for request in asked) > 12

    check()
    memory.release(2)
    assert all(array is None for array in worker.stage.weights)
    memory.restore()
    assert [(array.dtype, array.shape, array.sharding) for array in worker.stage.weights] == kinds
    check()


def test_blocks_that_devices_cannot_share_are_refused() -> None:
    model = formed(model_of({**LLAMA, "intermediate_size": 1536}), Q4_K)
    check_split(model, ParallelConfig(tensor_parallel=2))
    with pytest.raises(
        UnevenBlocks, match=r"the 1536 inputs of layers\.0\.down\.weight .* 256, .*; 1, 2 split"
    ) as caught:
        check_split(
            formed(model_of({**LLAMA, "head_dim": 128, "intermediate_size": 1536}), Q4_K),
            ParallelConfig(tensor_parallel=4),
        )
    assert isinstance(caught.value, ConfigError)


def test_forms_are_of_each_weight_and_equal_layers_stay_equal() -> None:
    dense = model_of({**LLAMA, "num_hidden_layers": 4})
    forms: dict[str, WeightForm] = {f"layers.{i}.up.weight": Q4_0 for i in (0, 1, 3)}
    forms |= {"token_embedding": Q6_K, "layers.2.up.weight": DENSE}
    model = dense.with_forms(forms)
    assert model.weight_forms == {name: form for name, form in forms.items() if form != DENSE}
    assert model.layers[0] == model.layers[1] == model.layers[3] != model.layers[2] == dense.layers[2]
    assert model != dense and model.with_forms({}) == dense
    assert config_from_json(config_to_json(model), plain_error) == dense
    assert with_forms_of_json(dense, json.loads(json.dumps(forms_to_json(model)))) == model
    mixed = formed(dense, Q4_K)
    assert with_forms_of_json(dense, json.loads(json.dumps(forms_to_json(mixed)))) == mixed
    table = parameter_table(model)
    assert {name: one.form for name, one in table.items() if one.form != DENSE} == model.weight_forms
    less = stage_bytes(dense, range(4), 1, 4) - stage_bytes(model, range(4), 1, 4)
    assert less == 3 * 2 * 512 * 256 * (4 - 18 / 32) + 211 * 256 * (4 - 210 / 256)


def test_random_weights_are_in_their_form() -> None:
    model = formed(model_of({**LLAMA, "num_hidden_layers": 1}), Q4_K)
    one = parameter_table(model)["layers.0.qkv.weight"]
    weight = jax.jit(lambda key: init_parameter(one, key, jnp.dtype(jnp.float32)))(jax.random.key(0))
    expected = {name: (array.shape, array.dtype) for name, array in one.held_arrays("f4").items()}
    assert {name: (array.shape, array.dtype) for name, array in weight.arrays.items()} == expected
    assert 0.015 < numbers_of(one.form, weight.arrays).std() < 0.025
