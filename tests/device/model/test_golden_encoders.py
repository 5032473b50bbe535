"""Models with an encoder: the logits and tokens that transformers computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.families.attention_config import RelativeBias
from orca_jax.families.registry import FAMILIES
from orca_jax.model import reference
from tests.device.model.golden_encoders import NAMES, load_golden_encoder, quick_and_long

LONGEST = 60
QUICK = ("t5-few-buckets", "t5-gated", "umt5-untied", "bart-gelu", "mbart-scaled", "pegasus-no-table")


def filled(ids: tuple[int, ...], length: int, filling: int) -> jax.Array:
    return jnp.array(np.array([*ids, *[filling] * (length - len(ids))], np.int32))


@pytest.mark.parametrize("name", quick_and_long(NAMES, QUICK))
def test_reference_gives_the_same_logits_and_tokens(name: str) -> None:
    golden = load_golden_encoder(name)
    checkpoint = load_checkpoint(golden.directory, dtype=jnp.float32)
    model, n_tokens = checkpoint.config, len(golden.outputs[0])
    forward = jax.jit(reference.forward, static_argnums=0)

    def logits_of(row: int, ids: tuple[int, ...]) -> jax.Array:
        # One length, one program; what follows a token changes nothing.
        given = filled(ids, n_tokens, 0), filled(golden.inputs[row], LONGEST, -1)
        return forward(model, checkpoint.parameters, *given)[: len(ids)]

    for row, prefix, expected in golden.logits:
        np.testing.assert_allclose(logits_of(row, prefix), expected, rtol=0, atol=5e-5)
    assert model.decoder_start_token_id is not None
    forced = {0: model.forced_bos_token_id, n_tokens - 1: model.forced_eos_token_id}
    for row in range(0, len(golden.inputs), 6):
        sure = golden.sure(row)
        logits = logits_of(row, (model.decoder_start_token_id, *golden.outputs[row][:-1]))
        chosen = [int(logits[i].argmax()) if forced.get(i) is None else forced[i] for i in range(len(sure))]
        assert tuple(chosen) == sure, row


@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (8, 20), (12, 40), (64, 200), (4, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_buckets_by_distance_equal_the_references(n_buckets: int, max_distance: int, causal: bool) -> None:
    relative = RelativeBias(n_buckets=n_buckets, max_distance=max_distance)
    n = max_distance + 40
    by_distance = relative.buckets(causal=causal)
    position = np.arange(n)
    at = np.clip(position - position[:, None], -max_distance, max_distance) + max_distance
    expected = reference.relative_buckets(relative, n, causal=causal)
    np.testing.assert_array_equal(by_distance[at], expected)


def test_padding_of_an_input_is_not_seen() -> None:
    golden = load_golden_encoder("t5-relu")
    checkpoint = load_checkpoint(golden.directory, dtype=jnp.float32)
    row, prefix, expected = golden.logits[0]
    exact = reference.forward(
        checkpoint.config, checkpoint.parameters, jnp.array(prefix), jnp.array(golden.inputs[row])
    )
    np.testing.assert_allclose(exact, expected, rtol=0, atol=5e-5)


def test_the_comparison_compares_something() -> None:
    """Most choices are sure and vary, and each family has three models."""
    types: list[str] = []
    for name in NAMES:
        golden = load_golden_encoder(name)
        sure = sum(len(golden.sure(i)) for i in range(len(golden.outputs)))
        assert sure > 0.9 * sum(map(len, golden.outputs)), name
        assert len(set(golden.outputs)) > 0.4 * len(golden.outputs), name
        assert (min(map(len, golden.inputs)), max(map(len, golden.inputs))) == (1, LONGEST)
        types.append(name.partition("-")[0])
    families = {name for name, family in FAMILIES.items() if family.has_encoder}
    assert {kind for kind in types if types.count(kind) >= 3} == families
