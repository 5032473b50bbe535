"""New weights are put together on the devices as repeating heads and padding of the whole make them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from orca_jax.families.hf_config import read_config
from orca_jax.families.parameters import parameter_table
from orca_jax.families.trainers.array_form import EXPERTS
from orca_jax.launch.local_memory import _Fitting
from orca_jax.sharding.specs import spec
from tests.device.model.golden import DIRECTORY

FLOAT = jnp.dtype("float32")


@pytest.mark.parametrize(
    ("name", "n_devices"),
    [
        ("llama3-rope-tied", 2),  # 4 heads for a K/V head, which two devices hold
        ("gemma2-caps", 4),  # each query head has its own copy: the heads are flat
        ("gpt-oss-multi-query-tied", 5),  # biases and sinks
        ("olmo2-yarn", 2),  # norms over all queries and keys
        ("qwen3-5-grouped", 2),  # queries, keys and values of linear attention
        ("bamba-biases-tied", 3),  # one group of Mamba-2, whose rows each device has
    ],
)
def test_the_numbers_of_the_whole(name: str, n_devices: int) -> None:
    stored = read_config(DIRECTORY / name)
    model = stored.for_devices(n_devices)
    fitting, table = _Fitting(stored, model, FLOAT), parameter_table(model)
    mesh = Mesh(jax.devices()[:n_devices], ("tensor",))
    rng = np.random.default_rng(0)
    n_changed = 0
    for parameter, one in parameter_table(stored).items():
        if one.axes[0] == EXPERTS:
            continue
        value = rng.standard_normal(one.shape, np.float32)
        place = NamedSharding(mesh, spec(table[parameter], n_devices))
        found = fitting.placed(parameter, jnp.asarray(value), place)
        expected = np.asarray(fitting._fit(jnp.asarray(value), *fitting._kind(parameter)))
        assert found.sharding == place and found.shape == table[parameter].shape
        np.testing.assert_array_equal(np.asarray(found), expected.reshape(found.shape), parameter)
        n_changed += not np.array_equal(expected, value)
    assert n_changed >= 2
