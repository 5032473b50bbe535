"""A form of weights defined in this file alone, in two classes: int8 with a scale per output.

The expected results are those of the dense reference with the weights that NumPy dequantises.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import ServingConfig
from orca_jax.errors import ConfigError
from orca_jax.execution.worker import Worker
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import packable_weights, parameter_table, stage_bytes
from orca_jax.families.weight_form import HeldArray
from orca_jax.launch.local_memory import LocalMemory
from orca_jax.model.weight import FormedWeight, Products
from orca_jax.model.weight import held as as_held
from orca_jax.planning.sizes import engine_shape
from tests.device.greedy_reference import GreedyReference
from tests.device.harness import harness
from tests.device.model.drawn_weights import drawn
from tests.device.model.formed_models import device_bytes, requests, stages
from tests.device.model.golden import DIRECTORY

CHECKPOINT = DIRECTORY / "llama-biases-yarn"
SERVING = ServingConfig(max_batch_size=4, n_slots=256, max_batch_tokens=64)


@dataclass(frozen=True, slots=True)
class Int8:
    """The form: numbers from -64 to 64, and float32 scales, one for all inputs of an output."""

    multiple: int = 1
    fixed: str | None = None

    def arrays(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Mapping[str, HeldArray]:
        out = shape[:-1]
        return {
            "numbers": HeldArray(shape, np.dtype(np.int8), tuple(range(len(shape)))),
            "scales": HeldArray(out, np.dtype(np.float32), tuple(range(len(out)))),
        }


class Int8Weight(FormedWeight, form=Int8):
    """The form's products."""

    def product(self, x: jax.Array, products: Products) -> jax.Array:
        y = products(x, self.arrays["numbers"].astype(x.dtype))
        return (y * self.arrays["scales"].reshape(-1)).astype(x.dtype)

    @classmethod
    def encoded(cls, form: Any, dense: jax.Array) -> "Int8Weight":
        # Division by a power of two is exact, whatever XLA makes of it.
        scales = jnp.abs(dense).max(axis=-1) / 64
        numbers = jnp.round(dense / scales[..., None]).astype(jnp.int8)
        return cls(form, {"numbers": numbers, "scales": scales})


INT8 = Int8()


def formed(model: ModelConfig) -> ModelConfig:
    """The model with its layers' matrices in the form."""
    return model.with_forms(
        {name: INT8 for name, one in packable_weights(model).items() if one.use == "linear"}
    )


def quantised(dense: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise with NumPy, row by row."""
    rows = dense.reshape(-1, dense.shape[-1])
    scales = np.array([np.abs(row).max() / np.float32(64) for row in rows], np.float32)
    numbers = np.stack([np.rint(row / scale) for row, scale in zip(rows, scales, strict=True)])
    return numbers.astype(np.int8).reshape(dense.shape), scales.reshape(dense.shape[:-1])


def rounded(model: ModelConfig, parameters: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Dense parameters, rounded to numbers that the form can express."""
    found = dict(parameters)
    for name, one in parameter_table(model).items():
        if one.form == INT8:
            numbers, scales = quantised(np.asarray(parameters[name]))
            found[name] = jnp.asarray(numbers * scales[..., None])
    return found


@pytest.mark.matrix(but=["2-1"])
@pytest.mark.parametrize(("n_stages", "tensor"), [(1, 1), (1, 2), (2, 1)])
def test_it_is_loaded_split_counted_and_computed(n_stages: int, tensor: int) -> None:
    dense = load_checkpoint(CHECKPOINT, dtype=jnp.float32)
    model = formed(dense.config).for_devices(tensor)
    parts = stages(n_stages, tensor, model)
    loaded = load_checkpoint(
        CHECKPOINT,
        dtype=jnp.float32,
        forms=model.weight_forms,
        vocab_multiple=model.vocab_multiple,
        kv_repeats=model.attention.kv_repeats,
        placements=[part.placement(model) for part in parts],
    )
    n_formed = 0
    for part, own in zip(parts, loaded.stages, strict=True):
        for name, weight in own.items():
            if not isinstance(weight, Int8Weight):
                continue
            n_formed += 1
            numbers, scales = quantised(np.asarray(dense.parameters[name]))
            np.testing.assert_array_equal(weight.arrays["numbers"], numbers, err_msg=name)
            np.testing.assert_array_equal(weight.arrays["scales"], scales, err_msg=name)
            shards = [one.data.size for one in weight.arrays["numbers"].addressable_shards]
            assert shards == [numbers.size // tensor] * tensor, name
        assert device_bytes(own) == stage_bytes(model, part.layers, tensor, 4)
    assert n_formed == 4 * model.n_layers  # qkv, out, up, down
    asked = requests()
    merged = {name: weight for own in loaded.stages for name, weight in own.items()}
    harness(model, merged, SERVING, buckets=(64,), parts=parts).run(asked)
    reference = GreedyReference(dense.config, rounded(formed(dense.config), dense.parameters))
    n_sure = sum(reference.sure(request) for request in asked)
    assert n_sure > 12


def test_it_holds_a_quarter_of_the_dense_bytes() -> None:
    model = load_checkpoint(CHECKPOINT, dtype=jnp.float32).config
    with_form = formed(model)
    n = sum(np.prod(one.shape) for one in parameter_table(with_form).values() if one.form == INT8)
    n_out = sum(np.prod(one.shape[:-1]) for one in parameter_table(with_form).values() if one.form == INT8)
    dense, packed = (stage_bytes(one, range(one.n_layers), 1, 4) for one in (model, with_form))
    assert dense - packed == 3 * n - 4 * n_out


@pytest.mark.matrix(but=["2"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_it_is_updated_and_sleeps(tensor: int) -> None:
    model = formed(load_checkpoint(CHECKPOINT, dtype=jnp.float32).config)
    old, new = (drawn(model, seed) for seed in (1, 2))
    held = model.for_devices(tensor)
    (part,) = stages(1, tensor, held)
    shape = engine_shape(held, SERVING, n_workers=1)
    zeros = jax.tree.map(
        lambda array, place: jax.device_put(jnp.zeros(array.shape, array.dtype), place),
        {name: as_held(one, np.float32, lambda array: array) for name, one in parameter_table(held).items()},
        dict(part.placement(held)),
    )
    worker = Worker(held, zeros, shape, part)
    memory = LocalMemory([worker], stored=model, model=held, dtype=jnp.dtype("float32"))
    kinds = [(array.dtype, array.shape, array.sharding) for array in worker.stage.weights]

    def is_of(parameters: Mapping[str, Any]) -> None:
        asked = requests()
        harness(held, {}, SERVING, buckets=(64,), parts=(part,), workers=[worker]).run(asked)
        reference = GreedyReference(model, rounded(model, parameters))
        assert sum(reference.sure(request) for request in asked) > 12

    memory.prepare(old, cast=False, lora_scale=1.0)()
    is_of(old)
    memory.prepare(new, cast=False, lora_scale=1.0)()
    is_of(new)
    memory.release(2)
    assert all(array is None for array in worker.stage.weights)
    memory.restore()
    assert [(array.dtype, array.shape, array.sharding) for array in worker.stage.weights] == kinds
    is_of(new)
    adapter = {"layers.0.out.weight.lora_a": jnp.ones((2, *new["layers.0.out.weight"].shape[1:]))}
    adapter["layers.0.out.weight.lora_b"] = jnp.ones((new["layers.0.out.weight"].shape[0], 2))
    with pytest.raises(ConfigError, match=r"cannot be merged into layers\.0\.out\.weight"):
        memory.prepare(adapter, cast=False, lora_scale=1.0)
    is_of(new)
