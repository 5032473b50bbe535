"""Token exchange with the devices of the experts, against numpy: any routing, no token dropped."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from orca_jax.model.layers import Matmul, matmul
from orca_jax.model.shard import Shard
from orca_jax.model.token_slices import Slices
from orca_jax.sharding.device_group import TENSOR, WHOLE, DeviceGroup, send_padded

WIDTH, N_EXPERTS = 3, 8
Array = npt.NDArray[Any]


def on_each(n_devices: int, compute: Callable[..., Any], *specs: P, out: P = WHOLE) -> Callable[..., Any]:
    """Run `compute` with its shard on each of `n_devices`."""
    group = DeviceGroup(tuple(jax.devices()[:n_devices]), "exchange")
    mapped = jax.shard_map(
        lambda *arrays: compute(group.shard(), *arrays),
        mesh=group.mesh,
        in_specs=specs,
        out_specs=out,
        check_vma=False,
    )
    return jax.jit(mapped)


@cache
def sending(n: int, most: int) -> Callable[..., Any]:
    """Exchange every device's rows [n, N, H] and counts; return what every device receives."""

    def send(shard: Shard, rows: jax.Array, counts: jax.Array) -> jax.Array:
        del shard
        return send_padded(rows[0], counts, most=most, n_received=n * most, axis=TENSOR)[None]

    return on_each(n, send, P(TENSOR), WHOLE, out=P(TENSOR))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_rows_arrive_in_the_order_of_their_senders(data: st.DataObject) -> None:
    n, most = 4, 3
    counts = np.array(data.draw(st.lists(st.integers(0, most), min_size=n * n, max_size=n * n)))
    counts = counts.reshape(n, n).astype(np.int32)
    rows = np.full((n, n * most, WIDTH), np.nan, np.float32)  # nothing behind the last may be seen
    expected = np.zeros((n, n * most, WIDTH), np.float32)
    received = [0] * n
    for sender in range(n):
        at = 0
        for receiver in range(n):
            for _ in range(counts[sender, receiver]):
                value = np.full(WIDTH, 100 * sender + at, np.float32)
                rows[sender, at] = value
                expected[receiver, received[receiver]] = value
                at, received[receiver] = at + 1, received[receiver] + 1
    np.testing.assert_array_equal(sending(n, most)(rows, counts), expected)


def added(shard: Shard, x: jax.Array, weights: jax.Array, chosen: jax.Array, product: Matmul) -> jax.Array:
    """Apply local experts: expert i multiplies a token by i + 1; all else, and padding, adds nothing."""
    assert product.n_tokens is not None
    here = chosen // (N_EXPERTS // shard.n) == shard.index
    factor = jnp.where(here, weights * (chosen + 1), 0).sum(axis=1)
    real = jnp.arange(x.shape[0]) < product.n_tokens
    return jnp.where(real[:, None], x * factor[:, None], jnp.nan)


@cache
def exchange(n: int, n_tokens: int) -> Callable[..., Any]:
    """Exchange x [T, H] by weights and experts [T, k]; return the sum [T, H] and all experts [T, k]."""

    def compute(
        shard: Shard, x: jax.Array, weights: jax.Array, chosen: jax.Array, n_real: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        assert shard.exchange is not None
        slices = Slices(shard, shard.exchange, n_tokens)
        product = slices.product(Matmul(matmul.linear, matmul.grouped, n_tokens=n_real))
        x, weights, chosen = (slices.own(one) for one in (x, weights, chosen))
        mix = partial(added, shard)
        given, of_all = slices.exchanged(x, weights, chosen, product, mix, n_experts=N_EXPERTS)
        return slices.whole(given), of_all

    return on_each(n, compute, WHOLE, WHOLE, WHOLE, WHOLE)


def check(n: int, chosen: Array, n_real: int) -> None:
    n_tokens, rng = len(chosen), np.random.default_rng(0)
    x = rng.normal(size=(n_tokens, WIDTH)).astype(np.float32)
    weights = rng.uniform(size=chosen.shape).astype(np.float32)
    x[n_real:] = np.nan
    expected = x * (weights * (chosen + 1)).sum(axis=1, keepdims=True)
    given = (x, weights, chosen.astype(np.int32), np.array([n_real], np.int32))
    found, of_all = exchange(n, n_tokens)(*given)
    np.testing.assert_array_equal(of_all[:n_real], chosen[:n_real])
    np.testing.assert_allclose(found[:n_real], expected[:n_real], rtol=1e-5)
    np.testing.assert_array_equal(found[n_real:], 0)  # padding goes nowhere


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.parametrize(("n", "n_tokens"), [(2, 6), (4, 6), (8, 5)])
def test_every_token_gets_the_sum_of_its_experts(n: int, n_tokens: int, data: st.DataObject) -> None:
    one = st.lists(st.integers(0, N_EXPERTS - 1), min_size=3, max_size=3, unique=True)
    chosen = np.array(data.draw(st.lists(one, min_size=n_tokens, max_size=n_tokens)))
    check(n, chosen, data.draw(st.integers(0, n_tokens)))


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("chosen", [[0, 1, 2], [7, 6, 5], [0, 3, 7]], ids=str)
def test_all_tokens_may_go_to_one_device(n: int, chosen: list[int]) -> None:
    check(n, np.array([chosen] * 6), 6)


def test_more_experts_a_token_than_devices() -> None:
    check(2, np.array([[0, 1, 2, 3, 4, 5, 6]] * 6), 5)


def test_fewer_tokens_than_devices() -> None:
    check(8, np.array([[7, 0, 3]]), 1)


def test_a_token_with_nan_disturbs_no_other() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(6, WIDTH)).astype(np.float32)
    weights = rng.uniform(size=(6, 3)).astype(np.float32)
    chosen = np.array([[0, 3, 7], [1, 2, 6], [0, 3, 7], [0, 1, 2], [5, 6, 7], [0, 3, 7]], np.int32)
    n_real = np.array([6], np.int32)
    healthy = np.asarray(exchange(4, 6)(x, weights, chosen, n_real)[0])
    x[2], weights[2] = np.nan, np.nan
    found = np.asarray(exchange(4, 6)(x, weights, chosen, n_real)[0])
    others = [0, 1, 3, 4, 5]
    np.testing.assert_array_equal(found[others], healthy[others])
    assert np.isnan(found[2]).all()
