"""Presets: sizes against published numbers; large ones are traced without allocating memory."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import orca_jax
from orca_jax.families.attention_config import Attention
from orca_jax.families.hf_config import read_config
from orca_jax.families.parameters import parameter_shapes, parameter_table
from orca_jax.families.presets import PRESETS
from orca_jax.model import reference
from orca_jax.model.context import Iteration, Tokens
from orca_jax.model.kv_cache import BothMemory, LayerCache, LayerMemory, layer_memory
from orca_jax.model.recurrence import Rows
from orca_jax.model.transformer import Parameters, Transformer, init_parameters

TABLE_1 = {  # the paper's: parameters in billions, layers, hidden size
    "gpt3-13b": (13, 40, 5120),
    "gpt3-101b": (101, 80, 10240),
    "gpt3-175b": (175, 96, 12288),
    "gpt3-341b": (341, 120, 15360),
}


def n_parameters(name: str) -> int:
    return sum(math.prod(shape) for shape in parameter_shapes(PRESETS[name]).values())


def test_gpt2_has_the_published_number_of_parameters() -> None:
    assert n_parameters("gpt2") == 124_439_808
    assert n_parameters("gpt2-xl") == 1_557_611_200


@pytest.mark.parametrize("name", TABLE_1)
def test_presets_have_the_sizes_of_table_1(name: str) -> None:
    billions, n_layers, hidden_size = TABLE_1[name]
    config = PRESETS[name]
    assert (config.n_layers, config.hidden_size) == (n_layers, hidden_size)
    assert (config.head_size, config.n_positions, {each.size for each in config.feed_forwards}) == (
        128,
        2048,
        {4 * hidden_size},
    )
    assert (config.vocab_size, config.padded_vocab_size) == (50257, 50304)
    assert round(n_parameters(name) / 1e9) == billions


@pytest.mark.matrix(
    but=[
        "gpt3-175b",
        "llama-3.1-405b",
        "mixtral-8x7b",
        "gemma-3-1b",
        "deepseek-v3",
        "gpt-oss-20b",
        "gpt-oss-20b-mxfp4",
        "t5-small",
        "flan-t5-xl",
        "bart-large",
    ]
)
@pytest.mark.parametrize("name", PRESETS)
def test_shapes_of_init_and_forward(name: str) -> None:
    # The kinds of layers repeat; seven have them all, or those up to the first with attention.
    layers = PRESETS[name].layers
    n_layers = max(7, 1 + next(i for i, layer in enumerate(layers) if layer.attention is not None))
    config = replace(PRESETS[name], layers=layers[:n_layers])
    parameters = jax.eval_shape(
        partial(init_parameters, config, dtype=jnp.dtype(jnp.bfloat16)), jax.random.key(0)
    )
    assert parameters.keys() == parameter_table(config).keys()
    for key, value in parameter_table(config).items():
        arrays, own = value.held_arrays(jnp.bfloat16).values(), jax.tree.leaves(parameters[key])
        assert [(one.shape, one.dtype) for one in own] == [(one.shape, one.dtype) for one in arrays], key
    n_tokens = jax.ShapeDtypeStruct((3,), jnp.int32)
    inputs = [n_tokens] * (1 if config.encoder is None else 2)
    if not config.has_packed_experts:  # which the reference does not know
        logits = jax.eval_shape(partial(reference.forward, config), parameters, *inputs)
        assert (logits.shape, logits.dtype) == ((3, config.vocab_size), jnp.float32)

    def iteration(
        parameters: Parameters, tokens: jax.Array, rows: jax.Array
    ) -> tuple[jax.Array, list[LayerMemory]]:
        model = Transformer(config, parameters)
        sizes = {"n_blocks": 2, "block_size": 4, "n_states": 2}
        of_dtype = {"stored": jnp.bfloat16, "dtype": jnp.bfloat16}
        caches = [
            layer_memory(layer, **sizes, **of_dtype, make_cache=jnp.zeros, make_state=jnp.zeros)
            for layer in config.layers
        ]

        def attend(q: jax.Array, cache: LayerCache, attention: Attention, *_: jax.Array | None) -> jax.Array:
            return q[:, : attention.group, :, : attention.value_size]

        starts = jnp.array([0, 3])
        states = Rows(starts, jnp.zeros_like(tokens), starts[:1], starts[:1] == 0)
        x = model.embed(tokens, tokens)
        around = Iteration(
            tokens,
            tokens,
            Tokens(attend, cross=attend),
            rows=states if config.has_state else None,
            layer_inputs=model.layer_inputs(tokens, x),
        )
        x, _, caches, *_ = model.through(x, caches, around)
        return model.logits(x.at[rows].get()), caches

    n_rows = jax.ShapeDtypeStruct((2,), jnp.int32)
    logits, caches = jax.eval_shape(iteration, parameters, n_tokens, n_rows)
    assert (logits.shape, logits.dtype) == ((2, config.vocab_size), jnp.float32)
    assert len(caches) == config.n_layers
    first = next(layer for layer in config.layers if layer.attention is not None)
    assert first.attention is not None
    of_first = caches[config.layers.index(first)]
    keys = of_first.cache.keys if isinstance(of_first, BothMemory) else of_first.keys
    assert keys.shape == (2, first.attention.n_kv_heads, 4, first.attention.head_size)


def test_demo_is_the_model_in_the_package() -> None:
    directory = Path(orca_jax.__file__).parent / "demo_model"
    assert read_config(directory) == PRESETS["demo"]
