"""Compiles a stage's forward program for real or described devices, without running it."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import jax.stages
from jax.typing import DTypeLike

from orca_jax.execution.attention_backend import AttentionChoice, choose_attention
from orca_jax.execution.matmul_backend import choose_products
from orca_jax.execution.stage import Stage
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import parameter_table
from orca_jax.families.weight_form import HeldArray
from orca_jax.iteration.flat_batch import DECODE_CONTEXTS, FlatLayout, decode_tiers
from orca_jax.iteration.rows.scored import SCORED, scored_layout
from orca_jax.model.kv_cache import LayerMemory, layer_memory
from orca_jax.model.weight import held
from orca_jax.sharding.device_group import DeviceGroup
from orca_jax.sharding.partition import StagePart
from orca_jax.sharding.specs import CACHE_SPEC

BLOCK_SIZE = 16
DTYPE = jnp.dtype("bfloat16")


@dataclass(frozen=True)
class CompiledStage:
    """A compiled program with the bytes per device of its weights and of all its arguments.

    `score` is the last stage's program that scores a prompt's tokens, lowered but not compiled.
    """

    program: jax.stages.Compiled
    attention: str
    weights: int
    arguments: int
    score: jax.stages.Lowered | None


def described_array(
    shape: tuple[int, ...], place: jax.sharding.Sharding, dtype: DTypeLike = DTYPE
) -> jax.Array:
    """A placeholder for an array of this shape, dtype and sharding."""
    return cast(jax.Array, jax.ShapeDtypeStruct(shape, dtype, sharding=place))


def placed_parameters(model: ModelConfig, part: StagePart, dtype: DTypeLike = DTYPE) -> dict[str, Any]:
    """A stage's parameters as placeholders."""
    table = parameter_table(model)

    def described(array: HeldArray, place: jax.sharding.Sharding) -> jax.Array:
        return described_array(array.shape, place, array.dtype)

    return {
        name: jax.tree.map(described, held(table[name], dtype, lambda array: array), places)
        for name, places in part.placement(model).items()
    }


def compile_stage(
    model: ModelConfig,
    part: StagePart,
    bucket: int,
    *,
    max_bs: int,
    n_blocks: int,
    n_rows: int | None = None,
    block_size: int = BLOCK_SIZE,
    dtype: DTypeLike = DTYPE,
    deterministic: bool = False,
    command_buffer_collectives: bool = False,
    decode_context: int | None = None,
    compiler_options: Mapping[str, str | bool] | None = None,
) -> CompiledStage:
    """Compile one bucket's forward program, with the attention that is chosen for the devices of `part`.

    `n_rows` is the number of admitted requests, by default twice `max_bs`. With `decode_context` it is the
    program that runs `bucket` decodes of which the longest has so many tokens. `compiler_options` are passed
    to XLA in addition to the stage's.
    """
    stage, chosen = described_stage(
        model,
        part,
        block_size=block_size,
        dtype=dtype,
        deterministic=deterministic,
        command_buffer_collectives=command_buffer_collectives,
    )
    group = part.group
    encoder_blocks = 0 if model.encoder is None else -(-model.encoder.n_positions // block_size)
    max_blocks = -(-model.n_positions // block_size)
    states = model.has_state
    layout = FlatLayout(bucket, min(bucket, max_bs), max_blocks, encoder_blocks, states=states)
    if decode_context is not None:
        contexts = () if deterministic else DECODE_CONTEXTS[chosen.kind]
        tiers = decode_tiers(max_blocks, block_size, contexts)
        holding = [tier for tier in tiers if tier * block_size >= decode_context]
        if holding:
            layout = FlatLayout(bucket, bucket, holding[0], encoder_blocks, one_each=True, states=states)
    stored = chosen.stored(part.group.devices[0], dtype)
    n_rows = 2 * max_bs if n_rows is None else n_rows
    caches = described_caches(model, part, n_blocks, block_size, stored, states=(n_rows, dtype))
    hidden = described_array((bucket, model.hidden_size), group.place(), dtype)
    last_token = described_array((n_rows,), group.place(), jnp.int32)
    arrived = last_token if part.first else hidden
    buffer = described_array((stage.host_buffer.size(layout),), group.place(), jnp.int32)
    with _described(group):
        lowered = stage.forward.lower(stage.weights, caches, arrived, buffer, layout=layout)
    score = None
    if part.last and not encoder_blocks:
        scored = scored_layout(layout.max_blocks)
        taken = described_array((SCORED, model.carried_size), group.place(), dtype)
        cache = caches[model.memory_of(part.layers[-1]) - part.layers[0]]
        score_buffer = described_array((stage.score_buffer.size(scored),), group.place(), jnp.int32)
        with _described(group):
            score = stage.score.lower(stage.weights, taken, cache, score_buffer, layout=scored)
    weights = device_bytes(stage.weights)
    arguments = weights + device_bytes((caches, arrived, buffer))
    program = lowered.compile(dict(compiler_options or {}))
    return CompiledStage(program, chosen.description, weights, arguments, score)


def _described(group: DeviceGroup) -> AbstractContextManager[Any]:
    """Tell the lowering of Triton kernels for which GPU they are, where none is present."""
    return jax.sharding.use_abstract_mesh(group.mesh.abstract_mesh)


def described_stage(
    model: ModelConfig,
    part: StagePart,
    *,
    block_size: int = BLOCK_SIZE,
    dtype: DTypeLike = DTYPE,
    deterministic: bool = False,
    command_buffer_collectives: bool = False,
) -> tuple[Stage, AttentionChoice]:
    """A stage with placeholders for weights, and its attention."""
    group = part.group
    chosen = choose_attention(
        group.devices[0],
        model,
        n_heads=model.n_heads // len(group),
        block_size=block_size,
        dtype=dtype,
        deterministic=deterministic,
    )
    products = choose_products(group.devices[0], dtype, deterministic=deterministic)
    parameters = placed_parameters(model, part, dtype)
    stage = Stage(
        model,
        parameters,
        part,
        attention=chosen.path,
        products=products,
        command_buffer_collectives=command_buffer_collectives,
    )
    return stage, chosen


def described_caches(
    model: ModelConfig,
    part: StagePart,
    n_blocks: int,
    block_size: int,
    dtype: DTypeLike,
    *,
    states: tuple[int, DTypeLike] = (1, jnp.float32),
) -> list[LayerMemory]:
    """Placeholders for a stage's caches; `dtype` is the dtype that the device stores.

    `states` are the number of recurrent layers' states and the model's dtype.
    """
    place = part.group.place(CACHE_SPEC)
    n_states, of_model = states

    def paged(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        return described_array(shape, place, dtype)

    def state(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        return described_array(shape, place, dtype)

    return [
        layer_memory(
            model.layers[i],
            n_blocks=n_blocks,
            block_size=block_size,
            stored=dtype,
            n_states=n_states,
            dtype=of_model,
            make_cache=paged,
            make_state=state,
        )
        for i in part.layers
    ]


def device_bytes(arrays: object) -> int:
    """The bytes of a tree of arrays on each of its devices."""
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(arrays)
    )
