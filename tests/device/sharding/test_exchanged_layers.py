"""A layer that exchanges tokens, against the same layer whole on one device: every kind of residual."""

from dataclasses import replace
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.families.attention_config import Attention
from orca_jax.families.model_config import Residual
from orca_jax.families.parameters import layer_parameters
from orca_jax.model.block import Block
from orca_jax.model.context import Iteration, Tokens
from orca_jax.model.kv_cache import LayerCache
from orca_jax.model.shard import ALONE, Shard
from orca_jax.sharding.device_group import WHOLE, DeviceGroup
from orca_jax.sharding.specs import spec
from tests.device.model.drawn_weights import drawn
from tests.device.model.mixture_models import mixture_model

N_DEVICES = 4
MODEL = mixture_model(hidden=32, size=48, top_k=2, n_layers=1)
CACHE = LayerCache(jnp.zeros(()), jnp.zeros(()))


def queries(q: jax.Array, cache: LayerCache, attention: Attention, *_: jax.Array | None) -> jax.Array:
    """Attention in which each query is its own result."""
    del cache
    return q[:, : attention.group]


# A head that drafts, whose layer is "joined", runs on one device.
RESIDUALS: list[Residual] = [kind for kind in get_args(Residual) if kind != "joined"]


@pytest.mark.matrix(but=["pre-None", "parallel-None", "pre-taken"])
@pytest.mark.parametrize(
    ("residual", "taken"),
    [
        *(pytest.param(kind, None, id=f"{kind}-None") for kind in RESIDUALS),
        *(pytest.param(kind, [5, 0, 3], id=f"{kind}-taken") for kind in ("pre", "parallel")),
    ],
)
def test_results_equal_those_of_one_device(residual: Residual, taken: list[int] | None) -> None:
    model = replace(MODEL, layers=(replace(MODEL.layers[0], residual=residual),))
    values: dict[str, Any] = {
        name.removeprefix("layers.0."): value for name, value in drawn(model, 2).items() if "layers" in name
    }
    x = jax.random.normal(jax.random.key(1), (6, 32))

    def run(shard: Shard, own: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        block = Block(model.layers[0], own.get)
        wanted = None if taken is None else Tokens(queries, at=jnp.array(taken))
        iteration = Iteration(jnp.arange(len(x)), None, Tokens(queries), wanted, shard)
        return block(x, iteration.context(block.config, x, CACHE, None, only_wanted=wanted is not None))

    group = DeviceGroup(tuple(jax.devices()[:N_DEVICES]), "exchange")
    specs = {name: spec(one, N_DEVICES) for name, one in layer_parameters(model, 0).items()}
    split = jax.shard_map(
        lambda own, x: run(group.shard(), own, x),
        mesh=group.mesh,
        in_specs=(specs, WHOLE),
        out_specs=WHOLE,
        check_vma=False,
    )
    assert "reduce_scatter" in str(jax.make_jaxpr(split)(values, x))
    np.testing.assert_allclose(
        jax.jit(split)(values, x), jax.jit(partial(run, ALONE))(values, x), rtol=1e-4, atol=1e-4
    )
