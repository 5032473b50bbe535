"""The gated delta rule and Mamba-2's recurrence, beside NumPy token by token and transformers' functions."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.execution.matmul_backend import Products
from orca_jax.model import linear_attention
from orca_jax.model.recurrence import Heads, Kept, RecurrentKernels, Rows
from tests.device.model.golden import DIRECTORY
from tests.device.native.native_form import needs_native

N_STATES, BUCKET, N_ROWS = 7, 200, 5
N_DRAFTS = 3  # the most of a request
KEYS, GROUP, KEY_SIZE, VALUE_SIZE = 2, 3, 6, 5
HEADS = KEYS * GROUP
NATIVE = pytest.param("native", marks=needs_native)


class Drawn(NamedTuple):
    """Inputs of a bucket's tokens; beta is not used by a state space."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    decay: np.ndarray
    beta: np.ndarray


def drawn(n_tokens: int, seed: int) -> Drawn:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((n_tokens, *shape)).astype(np.float32)

    q, k = normal(KEYS, KEY_SIZE), normal(KEYS, KEY_SIZE)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    decay = -np.log1p(np.exp(2 * normal(HEADS)))
    return Drawn(q, k, normal(HEADS, VALUE_SIZE), decay, 1 / (1 + np.exp(-normal(HEADS))))


def token_by_token(x: Drawn, state: np.ndarray, *, delta: bool) -> tuple[np.ndarray, np.ndarray]:
    """The definition, in float64: results [n, HEADS, V] and the last state [HEADS, K, V]."""
    state, out = state.astype(np.float64), np.zeros(x.v.shape)
    for t, (q, k, v, decay, beta) in enumerate(zip(*x, strict=True)):
        for head in range(HEADS):
            key = k[head // GROUP].astype(np.float64)
            before = np.exp(np.float64(decay[head])) * state[head]
            taken = beta[head] * (v[head] - key @ before) if delta else v[head]
            state[head] = before + np.outer(key, taken)
            out[t, head] = q[head // GROUP] @ state[head]
    return out, state


def rows_of(
    lengths: Sequence[int], states: Sequence[int], starts: Sequence[bool], n_rows: int, n_tokens: int
) -> Rows:
    """Rows of these lengths, and padding."""
    n, spare = sum(lengths), n_rows - len(lengths)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return Rows(
        row_start=jnp.array([*np.cumsum([0, *lengths]), *[n] * spare], jnp.int32),
        row_of_token=jnp.array([*owner, *[n_rows] * (n_tokens - n)], jnp.int32),
        state_of_row=jnp.array([*states, *[N_STATES] * spare], jnp.int32),
        starts=jnp.array([*starts, *[False] * spare]),
    )


@partial(jax.jit, static_argnames=("delta", "one_each", "form"))
def ran(
    x: Any, state: jax.Array, rows: Any, *, delta: bool, one_each: bool = False, form: str = ""
) -> tuple[jax.Array, jax.Array]:
    """The engine's results and states; `form` names one of the functions between which platforms choose."""
    kept = Kept(rows[4][0], rows[4][1], N_DRAFTS) if len(rows) > 4 else None
    kernels = Products(native=form == "native").recurrent
    rows = Rows(*rows[:4], one_each=one_each, kept=kept, kernels=kernels)
    heads = Heads(x.q, x.k, x.v, x.decay, x.beta if delta else None)
    if form and kernels == RecurrentKernels():
        by_group = state.reshape(N_STATES, KEYS, GROUP, KEY_SIZE, VALUE_SIZE)
        options = {"most": N_DRAFTS} if form == "_drafts_at_once" else {}
        run, inputs = getattr(linear_attention, form), linear_attention._grouped(heads)
        out, by_group = run(inputs, by_group, rows.table(N_STATES), **options)
        return out.reshape(x.v.shape), by_group.reshape(state.shape)
    return linear_attention.linear_attention(heads, state, rows)


LENGTHS = st.lists(
    st.sampled_from([1, 1, 1, 2, 3, 15, 16, 17, 33, 63, 64, 65, 66, 130]), max_size=N_ROWS
).filter(lambda lengths: sum(lengths) <= BUCKET)


@pytest.mark.parametrize("form", ["", "_chunks_at_once", NATIVE])
@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "state space"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_rows_of_any_lengths_are_each_what_they_are_alone(
    delta: bool, form: str, data: st.DataObject
) -> None:
    lengths = data.draw(LENGTHS)
    states = data.draw(st.permutations(range(N_STATES)))[: len(lengths)]
    starts = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    x, rng = drawn(BUCKET, seed=data.draw(st.integers(0, 99))), np.random.default_rng(1)
    x.q[sum(lengths) :] = np.nan  # padding reaches nothing
    x.v[sum(lengths) :] = np.nan
    before = rng.standard_normal((N_STATES, HEADS, KEY_SIZE, VALUE_SIZE)).astype(np.float32)
    rows = rows_of(lengths, states, starts, N_ROWS, BUCKET)
    out, after = ran(x, jnp.array(before), tuple(rows)[:4], delta=delta, form=form)
    expected, begin = before.copy(), 0
    for length, at, fresh in zip(lengths, states, starts, strict=True):
        own = Drawn(*(each[begin : begin + length] for each in x))
        start = np.zeros_like(before[at]) if fresh else before[at]
        results, expected[at] = token_by_token(own, start, delta=delta)
        np.testing.assert_allclose(out[begin : begin + length], results, atol=3e-5, rtol=1e-4)
        begin += length
    np.testing.assert_allclose(after, expected, atol=3e-5, rtol=1e-4)
    untouched = [at for at in range(N_STATES) if at not in states]
    assert np.array_equal(np.asarray(after)[untouched], before[untouched])


@pytest.mark.parametrize("form", ["", "_drafts_at_once", NATIVE])
@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "state space"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_state_after_each_token_of_a_drafted_row_is_kept(
    delta: bool, form: str, data: st.DataObject
) -> None:
    """Beside prompts and decodes. A drafted row of n tokens takes n places of the N_ROWS."""
    lengths, drafted, n_left = list[int](), list[bool](), N_ROWS
    while n_left and len(lengths) < 3:
        is_drafted = n_left > 1 and data.draw(st.booleans())
        most = min(n_left, 1 + N_DRAFTS)
        length = data.draw(st.integers(2, most) if is_drafted else st.sampled_from([1, 2, 16, 17, 65]))
        lengths.append(length)
        drafted.append(is_drafted)
        n_left -= length if is_drafted else 1
    order = data.draw(st.permutations(range(N_STATES)))
    states, places = order[: len(lengths)], iter(order[len(lengths) :])
    starts = [not is_drafted and data.draw(st.booleans()) for is_drafted in drafted]
    x, rng = drawn(BUCKET, seed=data.draw(st.integers(0, 99))), np.random.default_rng(1)
    x.q[sum(lengths) :] = np.nan
    x.v[sum(lengths) :] = np.nan
    before = rng.standard_normal((N_STATES, HEADS, KEY_SIZE, VALUE_SIZE)).astype(np.float32)
    expected, begin, outs, kept = before.copy(), 0, list[np.ndarray](), list[tuple[int, int]]()
    for length, at, fresh, is_drafted in zip(lengths, states, starts, drafted, strict=True):
        own = Drawn(*(each[begin : begin + length] for each in x))
        start = np.zeros_like(before[at]) if fresh else before[at]
        results, expected[at] = token_by_token(own, start, delta=delta)
        outs.append(results)
        for n in range(1, length * is_drafted):
            place = next(places)
            _, expected[place] = token_by_token(Drawn(*(each[:n] for each in own)), start, delta=delta)
            kept.append((begin + n - 1, place))
        begin += length
    kept += [(begin - 1, N_STATES)] * (N_ROWS - len(kept))
    token, at_place = (jnp.array(each, jnp.int32) for each in zip(*kept, strict=True))
    rows = (*tuple(rows_of(lengths, states, starts, N_ROWS, BUCKET))[:4], (token, at_place))
    out, after = ran(x, jnp.array(before), rows, delta=delta, form=form)
    np.testing.assert_allclose(out[:begin], np.concatenate(outs), atol=3e-5, rtol=1e-4)
    np.testing.assert_allclose(after, expected, atol=3e-5, rtol=1e-4)
    untouched = [at for at in range(N_STATES) if at not in states and at not in at_place]
    assert np.array_equal(np.asarray(after)[untouched], before[untouched])


@pytest.mark.parametrize("form", ["", NATIVE])
@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "state space"])
def test_a_batch_of_decodes_takes_one_step_for_each_row(delta: bool, form: str) -> None:
    n_rows = 8
    x = drawn(n_rows, seed=3)
    before = np.random.default_rng(2).standard_normal((N_STATES, HEADS, KEY_SIZE, VALUE_SIZE))
    before = before.astype(np.float32)
    states, starts = [4, 0, 6, 1, 2], [False, True, False, False, True]
    rows = rows_of([1] * 5, states, starts, n_rows, n_rows)
    out, after = ran(x, jnp.array(before), tuple(rows)[:4], delta=delta, one_each=True, form=form)
    expected = before.copy()
    for row, (at, fresh) in enumerate(zip(states, starts, strict=True)):
        own = Drawn(*(each[row : row + 1] for each in x))
        start = np.zeros_like(before[at]) if fresh else before[at]
        results, expected[at] = token_by_token(own, start, delta=delta)
        np.testing.assert_allclose(out[row], results[0], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(after, expected, atol=1e-5, rtol=1e-5)
    assert np.array_equal(np.asarray(after)[[3, 5]], before[[3, 5]])


@pytest.mark.parametrize("form", ["", NATIVE])
@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "state space"])
def test_another_rows_poison_stays_its_own(delta: bool, form: str) -> None:
    x = drawn(BUCKET, seed=5)
    for each in x:
        each[70:141] = np.nan
    rows = rows_of([70, 71, 1, 40], [0, 1, 2, 3], [True] * 4, N_ROWS, BUCKET)
    nothing = jnp.zeros((N_STATES, HEADS, KEY_SIZE, VALUE_SIZE))
    out, after = ran(x, nothing, tuple(rows)[:4], delta=delta, form=form)
    assert np.isfinite(np.asarray(out)[:70]).all() and np.isfinite(np.asarray(out)[141:182]).all()
    assert np.isfinite(np.asarray(after)[[0, 2, 3]]).all()


@settings(max_examples=15, deadline=None)
@given(borders=st.lists(st.integers(1, BUCKET - 1), max_size=6, unique=True))
@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "state space"])
def test_a_request_in_pieces_is_the_request_in_one_pass(delta: bool, borders: list[int]) -> None:
    x = drawn(BUCKET, seed=8)
    state = jnp.full((N_STATES, HEADS, KEY_SIZE, VALUE_SIZE), 7.0)
    whole, last = ran(x, state, tuple(rows_of([BUCKET], [2], [True], N_ROWS, BUCKET))[:4], delta=delta)
    edges, outs = [0, *sorted(borders), BUCKET], list[np.ndarray]()
    for begin, end in pairwise(edges):
        part = Drawn(
            *(np.pad(each[begin:end], [(0, BUCKET - end + begin)] + [(0, 0)] * (each.ndim - 1)) for each in x)
        )
        rows = rows_of([end - begin], [2], [begin == 0], N_ROWS, BUCKET)
        out, state = ran(part, state, tuple(rows)[:4], delta=delta)
        outs.append(np.asarray(out)[: end - begin])
    np.testing.assert_allclose(np.concatenate(outs), whole, atol=3e-5, rtol=1e-4)
    np.testing.assert_allclose(state, last, atol=3e-5, rtol=1e-4)


def in_pieces(arrays: Sequence[np.ndarray], pieces: Sequence[int], shape: tuple[int, ...]) -> Any:
    """Run each piece of a request, whose state is the second of three."""
    state, outs, begin = jnp.full((3, *shape), 9.0), list[np.ndarray](), 0
    for n in pieces:
        rows = Rows(
            jnp.array([0, n], jnp.int32),
            jnp.zeros(n, jnp.int32),
            jnp.array([1], jnp.int32),
            jnp.array([begin == 0]),
        )
        heads = Heads(*(jnp.asarray(each[begin : begin + n]) for each in arrays))
        out, state = linear_attention.linear_attention(heads, state, rows)
        outs.append(np.asarray(out))
        begin += n
    return np.concatenate(outs), state[1]


def test_the_delta_rule_is_transformers() -> None:
    with np.load(DIRECTORY / "linear_attention.npz") as file:
        golden = {name: file[name] for name in file.files}
    q, k = (golden[f"delta_{name}"] for name in "qk")
    q, k = (each / np.sqrt((each**2).sum(-1, keepdims=True) + 1e-6) for each in (q, k))
    arrays = [q * q.shape[-1] ** -0.5, k, *(golden[f"delta_{name}"] for name in ("v", "decay", "beta"))]
    expected = golden["delta_state"]
    out, state = in_pieces(arrays, golden["pieces"], expected.shape)
    np.testing.assert_allclose(out, golden["delta_out"], atol=1e-5)
    np.testing.assert_allclose(state, expected, atol=1e-5)


def test_the_state_space_is_transformers() -> None:
    with np.load(DIRECTORY / "linear_attention.npz") as file:
        golden = {name.removeprefix("space_"): file[name] for name in file.files}
    step = np.log1p(np.exp(golden["dt"] + golden["dt_bias"]))
    x = golden["x"]
    arrays = [golden["c"], golden["b"], x * step[..., None], step * golden["a"]]
    out, state = in_pieces(arrays, golden["pieces"], golden["state"].shape)
    np.testing.assert_allclose(out + golden["skip"][:, None] * x, golden["out"], atol=2e-5)
    np.testing.assert_allclose(state, golden["state"], atol=2e-5)
