"""Experts of few tokens together: the same sums as a loop over tokens and experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.model.mixture_at_once import MOST_TOKENS, mixture_at_once

HIDDEN, SIZE = 16, 24
together = jax.jit(mixture_at_once)


def by_definition(
    x: np.ndarray, weights: np.ndarray, experts: np.ndarray, up: np.ndarray, down: np.ndarray
) -> np.ndarray:
    out = np.zeros(x.shape)
    for t, token in enumerate(x.astype(np.float64)):
        for weight, expert in zip(weights[t], experts[t], strict=True):
            if expert < len(up):
                gate, inner = up[expert].astype(np.float64) @ token
                out[t] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * inner))
    return out


@pytest.mark.parametrize(
    ("n_tokens", "n_experts", "top_k"),
    [(1, 16, 2), (2, 16, 2), (3, 16, 2), (5, 4, 1), (32, 16, 4), (MOST_TOKENS, 8, 2)],
)
def test_equals_the_definition(n_tokens: int, n_experts: int, top_k: int) -> None:
    """Up to 2 tokens of 2 of 16 experts copy weights, the others compute with all experts."""
    rng = np.random.default_rng(n_tokens)
    x = rng.standard_normal((n_tokens, HIDDEN)).astype(np.float32)
    up = rng.standard_normal((n_experts, 2, SIZE, HIDDEN)).astype(np.float32)
    down = rng.standard_normal((n_experts, HIDDEN, SIZE)).astype(np.float32)
    # An expert's number may be past the last: another device's, or a padding token's.
    experts = np.stack([rng.permutation(n_experts + 1)[:top_k] for _ in range(n_tokens)]).astype(np.int32)
    weights = rng.random((n_tokens, top_k)).astype(np.float32)
    if n_tokens > 2:
        experts[-1], x[-1] = n_experts, np.nan
    found = np.asarray(together(x, weights, experts, up, down))
    wanted = by_definition(np.nan_to_num(x), weights, experts, up, down)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)
    assert n_tokens <= 2 or not found[-1].any()


@pytest.mark.parametrize("n_tokens", [1, 12])
def test_an_expert_that_a_token_did_not_choose_cannot_spoil_it(n_tokens: int) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((n_tokens, HIDDEN)).astype(np.float32)
    up, down = np.ones((8, 2, SIZE, HIDDEN), np.float32), np.ones((8, HIDDEN, SIZE), np.float32)
    up[3], down[5] = np.nan, 1e38
    experts = np.tile(np.array([[0, 7]], np.int32), (n_tokens, 1))
    found = together(x, np.full(experts.shape, 0.5, np.float32), experts, up, down)
    assert np.isfinite(np.asarray(found)).all()


def test_many_tokens_have_no_such_form() -> None:
    shapes = ((MOST_TOKENS + 1, HIDDEN), (MOST_TOKENS + 1, 2), (8, 2, SIZE, HIDDEN), (8, HIDDEN, SIZE))
    x, weights, up, down = (jnp.zeros(shape) for shape in shapes)
    assert mixture_at_once(x, weights, weights.astype(jnp.int32), up, down) is None
