"""The parts that bench.iteration times run on the engine's caches, with every kind of attention."""

import jax
import jax.numpy as jnp
import pytest

from bench.device.iteration_parts import filled, time_parts
from bench.device.iteration_report import PARTS
from orca_jax.execution.attention_backend import choose_attention
from orca_jax.execution.attention_paths import PureJax
from orca_jax.execution.matmul_backend import choose_products
from orca_jax.families.presets import PRESETS
from orca_jax.model.kv_cache import LayerCache, cache_shape
from orca_jax.model.transformer import init_parameters
from tests.gpt_config import changed_config

MODEL = changed_config(PRESETS["demo"], vocab_size=97, n_layers=2, ffn_size=64)
FLOAT32 = jnp.dtype("float32")


@pytest.mark.parametrize(
    ("chosen", "n_tokens"), [(True, 2), (False, 2), (True, 32)], ids=["chosen", "static", "prefill"]
)
def test_each_part_is_timed(chosen: bool, n_tokens: int) -> None:
    device = jax.devices()[0]
    shape = cache_shape(MODEL.attention, n_blocks=8, block_size=16)
    caches = filled([LayerCache(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(MODEL.n_layers)])
    assert len(caches) == MODEL.n_layers
    assert all(array.shape == shape and float(array.std()) > 0.9 for cache in caches for array in cache.both)
    path = choose_attention(device, MODEL, n_heads=MODEL.n_heads, block_size=16, dtype=FLOAT32).path
    seconds = time_parts(
        MODEL,
        init_parameters(MODEL, jax.random.key(0), FLOAT32),
        caches,
        path if chosen else PureJax(follow_lengths=False),
        choose_products(device, FLOAT32).bind(None),
        n_tokens=n_tokens,
        n_rows=2,
        kv_length=40,
        repeat=2,
    )
    assert set(seconds) == set(PARTS) and min(seconds.values()) > 0
