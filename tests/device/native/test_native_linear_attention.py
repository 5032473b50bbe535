"""Linear attention in C beside NumPy, with states of several columns at a time and both widths of vectors."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.native import linear_attention
from orca_jax.native.linear_attention import has_linear_attention_form, native_linear_attention
from tests.device.native.native_form import needs_native, other_lanes

pytestmark = needs_native
N_STATES = 6
LENGTHS, STATES, STARTS = [1, 40, 0, 3, 1], [4, 0, N_STATES, 5, N_STATES], [False, True, False, False, True]


@pytest.mark.parametrize("lanes", [None, other_lanes()])
@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "state space"])
@pytest.mark.parametrize(
    ("key_size", "value_size", "n_keys", "group"),
    [(128, 128, 2, 2), (64, 32, 1, 5), (7, 69, 3, 1), (256, 1, 1, 2)],
)
def test_columns_of_heads_are_those_of_the_definition(
    key_size: int,
    value_size: int,
    n_keys: int,
    group: int,
    delta: bool,
    lanes: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that go on, start, have no token, and are padding; the tokens after them too."""
    if lanes is not None:
        monkeypatch.setattr(linear_attention, "target", partial(linear_attention.target, LANES=lanes))
    rng, n_tokens, n_heads = np.random.default_rng(0), sum(LENGTHS) + 2, n_keys * group

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((n_tokens, *shape)).astype(np.float32)

    q, k, v = normal(n_keys, key_size), normal(n_keys, key_size), normal(n_heads, value_size)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    decay, beta = -np.abs(normal(n_heads)), 1 / (1 + np.exp(-normal(n_heads))) if delta else None
    before = rng.standard_normal((N_STATES, n_heads, key_size, value_size)).astype(np.float32)
    start = np.cumsum([0, *LENGTHS]).astype(np.int32)
    out, after = native_linear_attention(
        jnp.array(q),
        jnp.array(k),
        jnp.array(v),
        jnp.array(decay),
        None if beta is None else jnp.array(beta),
        jnp.array(before),
        jnp.array(start),
        jnp.array(STATES, jnp.int32),
        jnp.array(STARTS),
        None,
    )
    true_out, true = np.zeros(v.shape), before.astype(np.float64)
    for row, (at, fresh) in enumerate(zip(STATES, STARTS, strict=True)):
        if at == N_STATES:
            continue
        if fresh:
            true[at] = 0
        for token in range(start[row], start[row + 1]):
            for head in range(n_heads):
                key, state = k[token, head // group], np.exp(decay[token, head]) * true[at, head]
                value = v[token, head] if beta is None else beta[token, head] * (v[token, head] - key @ state)
                true[at, head] = state + np.outer(key, value)
                true_out[token, head] = q[token, head // group] @ true[at, head]
    np.testing.assert_allclose(out, true_out, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(after, true, atol=1e-5, rtol=1e-4)
    assert np.array_equal(np.asarray(after)[[1, 2, 3]], before[[1, 2, 3]])


def test_keys_that_are_too_wide_are_not_taken() -> None:
    assert has_linear_attention_form(jnp.zeros((1, 1, 256)))
    assert not has_linear_attention_form(jnp.zeros((1, 1, 257)))
