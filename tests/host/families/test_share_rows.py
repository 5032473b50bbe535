"""The rows of recurrent mixers in the order of devices, and which numbers of devices there may be."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from orca_jax.errors import ConfigError
from orca_jax.families.attention_config import Attention
from orca_jax.families.model_config import Embedding, FeedForward, Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.parameters import parameter_table, runs_of, share_rows
from orca_jax.families.recurrence_config import (
    GatedDeltaNet,
    Mamba2,
    Recurrence,
    ShortConvolution,
    state_bytes,
)

NORM = Norm(kind="rms_norm", eps=1e-5)
DELTA = GatedDeltaNet(n_key_heads=2, n_value_heads=4, key_size=1, value_size=2, width=3)
MAMBA = Mamba2(n_heads=4, head_size=1, n_groups=2, state_size=2, width=3)


def model_of(recurrence: Recurrence, n_heads: int = 12) -> ModelConfig:
    attention = Attention(n_heads=n_heads, n_kv_heads=n_heads, head_size=2, qkv_bias=False, out_bias=False)
    feed_forward = FeedForward(size=24, activation="silu", gated=True, bias=False)
    attending = Layer(attention=attention, feed_forward=feed_forward, norm=NORM)
    return ModelConfig(
        vocab_size=48,
        n_positions=16,
        hidden_size=8,
        layers=(replace(attending, attention=None, recurrence=recurrence), attending),
        embedding=Embedding(size=8),
        positions=None,
        final_norm=NORM,
    )


@pytest.mark.parametrize(
    ("recurrence", "weight", "rows"),
    [
        # Queries 0 and 1, keys 2 and 3, values 4 to 11: a key head has two value heads of two rows.
        (DELTA, "delta_in.weight", [0, 2, 4, 5, 6, 7, 1, 3, 8, 9, 10, 11]),
        (DELTA, "conv.weight", [0, 2, 4, 5, 6, 7, 1, 3, 8, 9, 10, 11]),
        (DELTA, "delta_z.weight", None),
        (replace(DELTA, by_key_head=True), "delta_in.weight", None),
        (replace(DELTA, by_key_head=True), "conv.weight", [0, 2, 4, 5, 6, 7, 1, 3, 8, 9, 10, 11]),
        # Gates 0 to 3, x 4 to 7, B 8 to 11, C 12 to 15, steps 16 to 19.
        (MAMBA, "space_in.weight", [0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19]),
        (MAMBA, "conv.bias", [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]),
        (MAMBA, "space_out.weight", None),
        # One group, of which both devices have B (8, 9) and C (10, 11).
        (
            replace(MAMBA, n_groups=1),
            "space_in.weight",
            [0, 1, 4, 5, 8, 9, 10, 11, 12, 13, 2, 3, 6, 7, 8, 9, 10, 11, 14, 15],
        ),
        (replace(MAMBA, n_groups=1), "conv.weight", [0, 1, 4, 5, 6, 7, 2, 3, 4, 5, 6, 7]),
        (ShortConvolution(channels=8, width=3), "conv.weight", None),
    ],
)
def test_two_devices(recurrence: Recurrence, weight: str, rows: Sequence[int] | None) -> None:
    model = model_of(recurrence).for_devices(2)
    found = share_rows(model, f"layers.0.{weight}")
    assert (None if found is None else [*found]) == rows
    if rows is not None:
        assert parameter_table(model)[f"layers.0.{weight}"].shape[0] == len(rows)
    assert model.as_stored() == model_of(recurrence)
    assert share_rows(model.as_stored(), f"layers.0.{weight}") is None


def test_four_devices_of_two_groups_have_a_group_in_pairs() -> None:
    model = model_of(MAMBA).for_devices(4)
    found = share_rows(model, "layers.0.conv.weight")
    assert found == (0, 4, 5, 8, 9, 1, 4, 5, 8, 9, 2, 6, 7, 10, 11, 3, 6, 7, 10, 11)


def test_runs_of_neighbours() -> None:
    assert runs_of([4, 5, 6, 1, 2, 2, 3, 9]) == [(0, 4, 3), (3, 1, 2), (5, 2, 2), (7, 9, 1)]
    assert runs_of([]) == []


def test_a_devices_bytes_of_a_state() -> None:
    """Two bytes a number of the convolution's inputs, four of the heads'."""
    whole = 2 * 12 * 2 + 4 * 1 * 2 * 4
    assert state_bytes(DELTA, 2) == whole
    assert state_bytes(replace(DELTA, n_shares=2), 2) == whole // 2
    one_group = replace(MAMBA, n_groups=1)
    assert state_bytes(one_group, 2) == 2 * 8 * 2 + 4 * 2 * 4
    assert state_bytes(replace(one_group, n_shares=2), 2) == 2 * 6 * 2 + 2 * 2 * 4, "B and C are on both"


@pytest.mark.parametrize(
    ("recurrence", "n", "message"),
    [
        (ShortConvolution(channels=8, width=3), 3, "convolutions of 8 channels; use one of 1, 2, 4,"),
        (DELTA, 4, "2 key heads of linear attention; use one of 1, 2,"),
        (
            replace(MAMBA, n_heads=12, n_groups=4),
            3,
            "12 heads of Mamba-2 in 4 groups; use one of 1, 2, 4, 12,",
        ),
    ],
)
def test_other_numbers_are_refused_with_those_that_work(recurrence: Recurrence, n: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel is {n}, and recurrent layers have {message}"):
        model_of(recurrence).for_devices(n)
