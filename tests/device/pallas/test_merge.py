"""Merging parts: against float64, and with few operations, because every layer runs them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.pallas.merge import merge_rows, merge_tiles
from orca_jax.pallas.work_list.bounds import TILE, Plan
from orca_jax.pallas.work_list.work_items import MERGE, work_items

D = 8
PLANS = {
    "40 heads": Plan(32, 32, 40, 1),
    "groups of 4": Plan(32, 32, 8, 4),
    "one key/value head": Plan(32, 32, 1, 8),
    "cut at fixed places": Plan(32, 32, 4, 2).fixed(30000),
}


def parts(rng: np.random.Generator, n: int, *rows: int) -> tuple[np.ndarray, np.ndarray]:
    """n parts: rounded values and remainders [2, n, *rows, D], and tops [n, *rows] far apart."""
    values = rng.standard_normal((2, n, *rows, D)).astype(np.float32)
    return values * np.array([1, 1e-3], np.float32).reshape(
        2, *[1] * (values.ndim - 1)
    ), 50 * rng.standard_normal((n, *rows)).astype(np.float32)


def listed(merge: np.ndarray) -> list[int]:
    """The indices of a merge's parts."""
    part, following, stride, n_parts = map(int, merge[MERGE.part : MERGE.n_parts + 1])
    return [part, *(following + i * stride for i in range(n_parts - 1))]


def together(value: np.ndarray, top: np.ndarray, merge: np.ndarray) -> np.ndarray:
    """One merge's result [rows, D], in float64."""
    which = listed(merge)
    weight = np.exp2(top[which].astype(float) - top[which].max(axis=0))[..., None]
    return (weight * value[:, which].astype(float).sum(axis=0)).sum(axis=0) / weight.sum(axis=0)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_parts_of_rows_are_merged(plan: Plan) -> None:
    rng = np.random.default_rng(3)
    kv_length = np.array([30000] + [300] * 31, np.int32)
    work = work_items(np.arange(33, dtype=np.int32), kv_length, plan)
    merges = [m for m in work[plan.first_merge : plan.first_tile_merge] if m[MERGE.token] < plan.n_tokens]
    assert merges and max(m[MERGE.n_parts] for m in merges) > 2
    value, top = parts(rng, plan.n_parts, plan.group)
    unwritten = np.setdiff1d(np.arange(plan.n_parts), [i for merge in merges for i in listed(merge)])
    assert len(unwritten)
    value[:, unwritten], top[unwritten] = np.nan, np.nan
    top[[listed(merge)[1] for merge in merges]] = -np.inf  # of parts that see no key
    padded = np.pad(top, ((0, 0), (0, 3)), constant_values=np.nan)
    out = rng.standard_normal((plan.n_tokens, plan.group, plan.n_kv_heads, D)).astype(np.float32)
    want = out.copy()
    for merge in merges:
        want[merge[MERGE.token], :, merge[MERGE.head]] = together(value, top, merge)
    merged = jax.jit(merge_rows, static_argnums=4, static_argnames="grouped_last")
    got = merged(*map(jnp.asarray, (out, value, padded, work)), plan)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    turned = merged(*map(jnp.asarray, (out.swapaxes(1, 2), value, padded, work)), plan, grouped_last=True)
    np.testing.assert_array_equal(turned.swapaxes(1, 2), got)
    text = merged.lower(*map(jnp.asarray, (out, value, padded, work)), plan).as_text()
    assert text.count("stablehlo.") < 150  # one operation for each part would be ten times as many


@pytest.mark.parametrize(("n_kv_heads", "group"), [(8, 1), (2, 3), (1, 8), (1, 12)])
def test_parts_of_tiles_are_merged(n_kv_heads: int, group: int) -> None:
    rng = np.random.default_rng(4)
    plan = Plan(2048, 1, n_kv_heads, group)
    n_last = 2005 % plan.tile_tokens
    work = work_items(np.array([0, 2005], np.int32), np.array([2005], np.int32), plan)
    merges = [m for m in work[plan.first_tile_merge :] if m[MERGE.token] < plan.n_tokens]
    assert len(merges) > 9 and {int(m[MERGE.n_queries]) for m in merges} == {plan.tile_tokens, n_last}
    value, top = parts(rng, plan.n_tile_parts, TILE)
    top[[listed(merge)[1] for merge in merges], ::3] = -np.inf  # of rows that see none of a part's keys
    out = rng.standard_normal((plan.n_tokens, plan.group, plan.n_kv_heads, D)).astype(np.float32)
    want = out.copy()
    for merge in merges:
        token, n = map(int, (merge[MERGE.token], merge[MERGE.n_queries]))
        kv_head, first = divmod(int(merge[MERGE.head]), plan.group // plan.packed)
        # A tile's rows are [half, packed head, token of the half].
        rows = together(value, top, merge).reshape(2, plan.packed, plan.tile_tokens // 2, D)
        for query in range(n):
            half, i = divmod(query, plan.tile_tokens // 2)
            heads = slice(first * plan.packed, (first + 1) * plan.packed)
            want[token + query, heads, kv_head] = rows[half, :, i]
    got = jax.jit(merge_tiles, static_argnums=4)(*map(jnp.asarray, (out, value, top, work)), plan)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
