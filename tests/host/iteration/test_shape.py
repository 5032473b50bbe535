"""The sizes of an engine: impossible ones are refused, and derived ones follow from the others."""

from dataclasses import fields, replace
from typing import Any

import pytest

from orca_jax.config import ServingConfig
from orca_jax.errors import ConfigError
from orca_jax.iteration.flat_batch import FlatLayout, batch_sizes
from orca_jax.iteration.shape import EngineShape, serving_buckets
from orca_jax.planning.sizes import engine_shape, kv_manager
from tests.gpt_config import gpt_config
from tests.host.control.test_message_wire import ONE, message_of

SHAPE = EngineShape(
    block_size=4, max_blocks=8, max_rows=6, max_tokens=64, n_rows=12, n_blocks=64, vocab_size=300
)
WITHOUT_ENCODER, WITHOUT_EMBEDDINGS = "max_encoder_blocks", "embedding_size"  # may be 0
SIZES = [field.name for field in fields(EngineShape) if field.type in (int, "int")]
SIZES.remove(WITHOUT_ENCODER)
SIZES.remove(WITHOUT_EMBEDDINGS)
EXPERTS = ("sparse_layers", "top_k", "n_experts")  # may be 0 too
ADAPTERS = ("max_adapters", "adapter_rank")  # may be 0 too
STATES = ("n_snapshots", "n_draft_states", "max_drafts", "n_host_states")  # may be 0 too
SIZES = [name for name in SIZES if name not in (*EXPERTS, *ADAPTERS, *STATES, "n_host_blocks")]


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None, (1 << 31) + 1])
@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_a_whole_number_within_bounds(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is .*; it must be a whole number from 1 to \d+$"):
        replace(SHAPE, **{name: value})


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None, (1 << 21) + 1])
def test_the_encoder_s_blocks_are_a_whole_number_within_bounds(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{WITHOUT_ENCODER} is .*; it must be .* from 0 to 2097152$"):
        replace(SHAPE, max_encoder_blocks=value)


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None, (1 << 20) + 1])
def test_the_size_of_an_embedding_is_a_whole_number_within_bounds(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{WITHOUT_EMBEDDINGS} is .*; it must be .* from 0 to 1048576$"):
        replace(SHAPE, embedding_size=value)


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None, (1 << 31) + 1])
def test_the_host_s_blocks_are_a_whole_number_within_bounds(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^n_host_blocks is .*; it must be .* from 0 to 2147483648$"):
        replace(SHAPE, n_host_blocks=value)


@pytest.mark.parametrize("states", [False, True])
def test_snapshots_are_of_states(states: bool) -> None:
    most = (1 << 22) * states
    assert replace(SHAPE, states=states, n_snapshots=most).n_states == SHAPE.n_rows + most
    for value in (-1, most + 1, True):
        with pytest.raises(ConfigError, match=f"^n_snapshots is {value}; it must be .* from 0 to {most}$"):
            replace(SHAPE, states=states, n_snapshots=value)


@pytest.mark.parametrize("n_snapshots", [0, 2])
def test_the_host_s_states_are_of_snapshots(n_snapshots: int) -> None:
    shape, most = replace(SHAPE, states=True, n_snapshots=n_snapshots), (1 << 31) * bool(n_snapshots)
    assert replace(shape, n_host_states=most).n_host_states == most
    for value in (-1, most + 1, True):
        with pytest.raises(ConfigError, match=f"^n_host_states is {value}; it must be .* from 0 to {most}$"):
            replace(shape, n_host_states=value)


@pytest.mark.parametrize(("states", "drafts"), [(False, True), (True, False), (True, True)])
def test_states_after_drafts_are_of_states_and_drafts(states: bool, drafts: bool) -> None:
    most = (1 << 22) * (states and drafts)
    shape = replace(SHAPE, states=states, drafts=drafts, n_snapshots=3 * states)
    assert replace(shape, n_draft_states=most).n_states == SHAPE.n_rows + 3 * states + most
    for name, value in (("n_draft_states", most + 1), ("max_drafts", most + 1), ("max_drafts", -1)):
        with pytest.raises(ConfigError, match=f"^{name} is {value}; it must be .* from 0 to {most}$"):
            replace(shape, **{name: value})


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None, (1 << 16) + 1])
@pytest.mark.parametrize("name", EXPERTS)
def test_numbers_of_experts_are_whole_numbers_within_bounds(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is .*; it must be .* from 0 to 65536$"):
        replace(SHAPE, **{name: value})


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None, (1 << 12) + 1])
@pytest.mark.parametrize("name", ADAPTERS)
def test_the_room_for_adapters_is_a_whole_number_within_bounds(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is .*; it must be .* from 0 to 4096$"):
        replace(SHAPE, **{name: value})


@pytest.mark.parametrize("name", ["deterministic", "coarse_buckets"])
@pytest.mark.parametrize("value", [0, 1, None, "true"])
def test_a_choice_is_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is .*; it must be True or False$"):
        replace(SHAPE, **{name: value})


def test_every_engine_that_can_be_configured_has_a_shape() -> None:
    model = gpt_config(
        vocab_size=1 << 22, n_positions=1 << 21, hidden_size=8, n_layers=1, n_heads=1, ffn_size=8
    )
    largest = ServingConfig(
        max_batch_size=4096, n_slots=1 << 31, max_batch_tokens=1 << 20, block_size=1, deterministic=True
    )
    shape = engine_shape(model, largest, n_workers=256)
    assert shape.n_rows == 257 * 4096
    assert (shape.n_slots, shape.longest, shape.vocab_size) == (1 << 31, 1 << 21, 1 << 22)


def test_a_shape_follows_from_model_and_config() -> None:
    model = gpt_config(vocab_size=100, n_positions=33, hidden_size=8, n_layers=2, n_heads=2, ffn_size=16)
    serving = ServingConfig(
        max_batch_size=5, n_slots=131, max_batch_tokens=77, block_size=16, coarse_buckets=True
    )
    shape = engine_shape(model, serving, n_workers=2)
    assert shape == EngineShape(
        block_size=16,
        max_blocks=3,
        max_rows=5,
        max_tokens=77,
        n_rows=15,
        n_blocks=8,
        vocab_size=100,
        coarse_buckets=True,
        embedding_size=8,
    )
    kv = kv_manager(shape)
    assert (kv.n_blocks, kv.block_size, kv.n_rows, kv.block_table.shape) == (8, 16, 15, (15, 3))


@pytest.mark.parametrize(
    ("deterministic", "coarse", "buckets"),
    [
        (False, False, (1, 8, 16, 24, 32, 40, 48, 56, 64)),
        (False, True, (1, 8, 16, 32, 48, 64)),
        (True, False, (6, 64)),
    ],
)
def test_buckets_and_layouts_follow_from_a_shape(
    deterministic: bool, coarse: bool, buckets: tuple[int, ...]
) -> None:
    shape = replace(SHAPE, deterministic=deterministic, coarse_buckets=coarse)
    assert shape.buckets == buckets
    serving = ServingConfig(
        max_batch_size=6, max_batch_tokens=64, deterministic=deterministic, coarse_buckets=coarse
    )
    assert serving_buckets(serving) == buckets, "they are known before the model is"
    layouts = batch_sizes(shape).layouts
    assert layouts == [FlatLayout(n, min(n, 6), 8) for n in buckets]


def test_a_deterministic_engine_of_one_size_has_one_bucket() -> None:
    assert replace(SHAPE, deterministic=True, max_tokens=6).buckets == (6,)


def laid_out(shape: EngineShape, **row: Any) -> tuple[int, str]:
    """Lay out one sampled row: its bucket, and its sampler."""
    flat = batch_sizes(shape).lay_out(message_of([{**ONE, "temperature": 0.5, **row}]))
    return flat.layout.n_tokens, flat.programs.sampler


def test_an_iteration_is_padded_to_the_smallest_bucket_or_to_its_phase_s_bucket() -> None:
    prefill = {"initiation": True, "kv_length": 5, "token_ids": [1] * 5, "blocks": [1, 2]}
    assert laid_out(SHAPE) == (1, "plain")
    assert laid_out(SHAPE, **prefill) == (8, "plain")
    deterministic = replace(SHAPE, deterministic=True)
    assert laid_out(deterministic) == (6, "full")
    assert laid_out(deterministic, **prefill) == (64, "full")
