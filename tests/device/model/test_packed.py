"""Experts in MXFP4 give the same products and tokens as dequantised ones, and take the file's bytes."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from orca_jax import LLM, SamplingParams, find_config
from orca_jax.checkpoint.convert import convert_checkpoint
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import ExpertExchange, ParallelConfig, ServingConfig
from orca_jax.errors import ConfigError, TensorMismatch, UnsupportedModel
from orca_jax.families.config_json import config_to_json
from orca_jax.families.mixtures.mxfp4 import BIAS, GREATEST_SCALE, unpack
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.packed_form import MXFP4
from orca_jax.families.parameters import parameter_table, stage_bytes
from orca_jax.model.layers import grouped_matmul
from orca_jax.model.packed import unpack_at_once, unpack_by_row, unpack_one_by_one
from orca_jax.model.packed_weight import unpacked
from orca_jax.model.transformer import init_parameters
from orca_jax.model.weight import PackedWeight
from orca_jax.sharding.partition import split_model
from tests.device.harness import greedy_request, harness
from tests.device.model.golden import DIRECTORY, load_golden

PACKED = "gpt-oss-mxfp4"
UP = "layers.0.experts.up.weight"


def drawn(shape: tuple[int, ...], seed: int) -> dict[str, np.ndarray]:
    """Planes of random packed weights with numbers of about 1."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
    scales = rng.integers(BIAS - 3, BIAS + 1, (*shape[:-1], shape[-1] // 32), np.uint8)
    return {"codes": codes, "scales": scales}


def by_numpy(planes: Mapping[str, np.ndarray]) -> np.ndarray:
    """Unpack to float32 with NumPy, from bytes in the file's order."""
    codes = planes["codes"].reshape(-1, 1, 16)
    codes = np.concatenate([codes & 15, codes >> 4], axis=1).reshape(-1, 16, 2)
    rows = (codes[..., 0] | codes[..., 1] << 4).reshape(-1, planes["codes"].shape[-1])
    bits = unpack(np.ascontiguousarray(rows, np.uint8), planes["scales"].reshape(len(rows), -1))
    shape = (*planes["codes"].shape[:-1], 2 * planes["codes"].shape[-1])
    return bits.view(ml_dtypes.bfloat16).astype(np.float32).reshape(shape)


def as_dense(value: Any) -> np.ndarray:
    """A parameter as dense numbers."""
    if not isinstance(value, PackedWeight):
        return value
    return by_numpy({name: np.asarray(plane) for name, plane in value.arrays.items()})


def multiplied(product: Any, x: jax.Array, planes: Any, sizes: jax.Array) -> jax.Array:
    """A product of rows by experts, which are unpacked as they are needed."""
    more: dict[str, Any] = {} if product is unpack_by_row else {"grouped": grouped_matmul}
    if product is unpack_one_by_one:
        more["n_out"] = planes["codes"].shape[1]

    def experts(at: jax.Array) -> jax.Array:
        return unpacked(MXFP4, {name: plane[at] for name, plane in planes.items()}, x.dtype)

    return product(x, sizes, experts=experts, **more)


def padded(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.pad(value, [(0, n - m) for n, m in zip(shape, value.shape, strict=True)])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_number_and_scale_is_unpacked_exactly(dtype: Any) -> None:
    byte = np.arange(256, dtype=np.uint8).reshape(16, 16)
    scales = np.arange(4, GREATEST_SCALE + 1, dtype=np.uint8)  # below, a CPU may take numbers for zero
    every = {"codes": np.tile(byte, (len(scales), 1)), "scales": scales.repeat(16)[:, None]}
    found = jax.jit(unpacked, static_argnums=(0, 2))(MXFP4, every, dtype)
    assert found.dtype == dtype
    assert np.array_equal(np.asarray(found, np.float32), by_numpy(every))


@pytest.mark.parametrize("product", [unpack_one_by_one, unpack_at_once, unpack_by_row])
@pytest.mark.parametrize(
    "sizes", [[3, 0, 2, 1], [0, 0, 0, 9], [0, 0, 0, 0], [1, 1, 1, 1], [9, 0, 0, 0]], ids=str
)
def test_the_products_equal_those_of_unpacked_weights(product: Any, sizes: list[int]) -> None:
    weight = drawn((4, 6, 64), 1)
    x = jax.random.normal(jax.random.key(0), (9, 64))
    x = x.at[sum(sizes) :].set(jnp.nan)
    found = jax.jit(lambda *each: multiplied(product, *each))(x, weight, jnp.array(sizes, jnp.int32))
    expected, at = np.zeros((9, 6)), 0
    for own, size in zip(by_numpy(weight), sizes, strict=True):
        expected[at : at + size] = np.asarray(x)[at : at + size].astype(np.float64) @ own.T
        at += size
    np.testing.assert_allclose(found, expected, atol=1e-4)


def described(n_experts: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The planes of experts [6, 64]."""
    return {
        name: jax.ShapeDtypeStruct((n_experts, 6, n), jnp.uint8) for name, n in (("codes", 32), ("scales", 2))
    }


def test_few_rows_unpack_few_experts() -> None:
    weight, sizes = described(128), jax.ShapeDtypeStruct((128,), jnp.int32)
    x = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    text = str(jax.make_jaxpr(lambda *each: multiplied(unpack_at_once, *each))(x, weight, sizes))
    assert "f32[4,6,64]" in text and "f32[128,6,64]" not in text


def test_the_devices_hold_the_file_s_own_bytes() -> None:
    given = load_checkpoint(DIRECTORY / PACKED, dtype=jnp.float32, packed=True)
    plain = load_checkpoint(DIRECTORY / PACKED, dtype=jnp.float32)
    assert given.config == plain.config.with_packed_experts()
    for name, parameter in parameter_table(given.config).items():
        value, expected = given.parameters[name], np.asarray(plain.parameters[name])
        arrays = parameter.held_arrays(np.float32).values()
        of_arrays = [(array.shape, array.dtype) for array in arrays]
        assert [(array.shape, array.dtype) for array in jax.tree.leaves(value)] == of_arrays
        assert np.array_equal(as_dense(value), expected), name
    shapes = {name: array.shape for name, array in given.parameters[UP].arrays.items()}
    assert shapes == {"codes": (3, 2, 64, 16), "scales": (3, 2, 64, 1)}
    n_bytes = sum(array.nbytes for array in jax.tree.leaves(given.parameters))
    assert n_bytes == stage_bytes(given.config, range(2), 1, 4)


def engine_tokens(model: ModelConfig, n_stages: int = 1, tensor: int = 1) -> dict[str, list[int]]:
    """The engine's tokens for all prompts of the golden model."""
    golden = load_golden(PACKED)
    parts = split_model(
        model, jax.devices(), ParallelConfig(tensor_parallel=tensor, pipeline_parallel=n_stages)
    )
    stages = load_checkpoint(
        golden.directory,
        dtype=jnp.float32,
        packed=model.has_packed_experts,
        vocab_multiple=model.vocab_multiple,
        kv_repeats=model.attention.kv_repeats,
        placements=[part.placement(model) for part in parts],
    ).stages
    parameters = {name: value for stage in stages for name, value in stage.items()}
    serving = ServingConfig(max_batch_size=32, n_slots=32 * 64, max_batch_tokens=64)
    engine = harness(model, parameters, serving, buckets=(64,), parts=parts)
    numbers = range(len(golden.prompts))
    outputs = engine.run([greedy_request(str(i), golden.prompts[i], len(golden.outputs[i])) for i in numbers])
    for i in numbers:
        sure = golden.sure(i)
        assert tuple(outputs[str(i)][: len(sure)]) == sure, i
    return outputs


@pytest.mark.parametrize(("n_stages", "tensor"), [(1, 1), (2, 1)])
def test_the_tokens_are_transformers_s(n_stages: int, tensor: int) -> None:
    engine_tokens(find_config(DIRECTORY / PACKED, "packed").for_devices(tensor), n_stages, tensor)


def test_devices_have_whole_packed_experts() -> None:
    model = find_config(DIRECTORY / PACKED, "packed")
    with pytest.raises(ConfigError, match="n_experts 3, of which each device has whole packed ones"):
        split_model(model, jax.devices(), ParallelConfig(tensor_parallel=2))
    wide = find_config("gpt-oss-20b", "packed")
    table = parameter_table(wide)
    up, down = table[UP], table["layers.0.experts.down.weight"]
    shapes = [one.held_arrays(np.float32)["codes"].shape for one in (up, down)]
    assert shapes == [(32, 2, 2880, 1440), (32, 2880, 1440)]
    assert [each.split_axis(2) for each in (up, down, table["layers.0.experts.up.bias"])] == [0, 0, 0]


@pytest.mark.long
def test_over_devices_the_tokens_are_the_same() -> None:
    """Random packed experts, two on each of two devices, against the same experts dequantised on one."""
    plain = load_checkpoint(DIRECTORY / PACKED, dtype=jnp.float32)
    layer = plain.config.layers[0]
    assert layer.experts is not None and layer.feed_forward is not None
    four = replace(layer.feed_forward, experts=replace(layer.experts, number=4))
    model = replace(
        plain.config, layers=tuple(replace(each, feed_forward=four) for each in plain.config.layers)
    )
    packed_model = model.with_packed_experts()
    packed = init_parameters(packed_model, jax.random.key(1), jnp.dtype("float32"))
    packed = {
        name: value if isinstance(value, PackedWeight) or value.ndim == 1 else 10 * value
        for name, value in packed.items()
    }
    dense = {name: jnp.asarray(as_dense(value)) for name, value in packed.items()}
    serving = ServingConfig(max_batch_size=4, n_slots=4 * 64, max_batch_tokens=64)
    prompts = [[7 * i % 97 for i in range(n)] for n in (1, 30, 9)]
    tokens: list[dict[str, list[int]]] = []
    cases: list[tuple[Any, Any, int, ExpertExchange]] = [
        (model, dense, 1, "auto"),
        (packed_model, packed, 1, "auto"),
        (packed_model, packed, 2, "gather"),
        (packed_model, packed, 2, "exchange"),
    ]
    for config, parameters, tensor, exchange in cases:
        config = config.for_devices(tensor)
        table = parameter_table(config)
        own = {
            name: value if isinstance(value, PackedWeight) else padded(value, table[name].shape)
            for name, value in parameters.items()
        }
        parallel = ParallelConfig(tensor_parallel=tensor, expert_exchange=exchange)
        parts = split_model(config, jax.devices(), parallel)
        engine = harness(config, own, serving, buckets=(64,), parts=parts)
        tokens.append(engine.run([greedy_request(str(i), prompt, 6) for i, prompt in enumerate(prompts)]))
    assert all(each == tokens[0] for each in tokens)
    assert len({token for row in tokens[0].values() for token in row}) > 5


def test_through_the_front_door() -> None:
    golden = load_golden(PACKED)
    sizes: dict[str, Any] = {"max_batch_size": 2, "n_slots": 128, "max_batch_tokens": 64, "dtype": "float32"}
    with LLM(golden.directory, load_format="packed", **sizes) as llm:
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        row = next(i for i, prompt in enumerate(golden.prompts) if len(prompt) == 23)
        (result,) = llm.generate([list(golden.prompts[row])], params)
        assert tuple(result.token_ids) == golden.outputs[row][:8]
        llm.sleep(level=2)
        llm.wake_up()
        (again,) = llm.generate([list(golden.prompts[row])], params)
        assert again.token_ids == result.token_ids
        with pytest.raises(ConfigError, match="cannot be replaced while experts are packed"):
            llm.update_weights(golden.directory)


def test_weights_that_cannot_stay_packed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no experts that could stay packed"):
        find_config("gpt2", "packed")
    with pytest.raises(ConfigError, match="hidden_size is 28; experts packed in MXFP4 need a multiple of 32"):
        find_config(DIRECTORY / "gpt-oss-yarn", "packed")
    convert_checkpoint(DIRECTORY / PACKED, tmp_path / "plain", to="safetensors")
    with pytest.raises(
        TensorMismatch, match=r"gate_up_proj' is not packed in MXFP4, so it cannot stay packed"
    ):
        load_checkpoint(tmp_path / "plain", dtype=jnp.float32, packed=True)
    convert_checkpoint(DIRECTORY / PACKED, tmp_path / "orbax")
    for packed in (True, False):
        with pytest.raises(UnsupportedModel, match="is an Orbax checkpoint, which has no packed experts"):
            load_checkpoint(tmp_path / "orbax", dtype=jnp.float32, packed=packed)
        model = config_to_json(find_config(DIRECTORY / PACKED, "packed"))
        (tmp_path / "orbax" / "orca.json").write_text(json.dumps({"model": model}))


def test_the_products_lower_for_a_gpu() -> None:
    def product(x: jax.Array, weight: Any, sizes: jax.Array) -> jax.Array:
        return multiplied(unpack_at_once, x, weight, sizes)

    arrays: list[Any] = [
        jax.ShapeDtypeStruct((8, 64), jnp.bfloat16),
        described(16),
        jax.ShapeDtypeStruct((16,), jnp.int32),
    ]
    text = jax.jit(product).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "tensor<8x6x64xbf16>" in text
