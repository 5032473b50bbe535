"""Attention in encoder-decoders: bidirectional, cross attention, and with a relative bias.

Pure JAX and C against a dense softmax per query in float64.
"""

from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orca_jax.model.attention import attention_work, split_attention
from orca_jax.model.kv_cache import LayerCache
from orca_jax.native.split_attention import native_split_attention
from tests.device.model.ragged import Ragged
from tests.device.native.attention_truth import MOST_KEYS, MOST_ROWS, MOST_TOKENS, Form, batch_of, truth
from tests.device.native.native_form import needs_native

Path = Literal["native", "follow_lengths", "static"]
PATHS = [pytest.param("native", marks=needs_native), "follow_lengths", "static"]
FORMS = [
    Form(1, 4, 64, 16, causal=False),
    Form(1, 4, 64, 16, scale=1.0, causal=False, furthest=20),
    Form(1, 3, 16, 8, causal=False, furthest=300),
    Form(3, 4, 64, 16, soft_cap=4.0, causal=False),
    Form(1, 4, 64, 16, scale=1.0, furthest=20),
    Form(1, 3, 16, 8, window=60, furthest=128),
]
HALF_UNIT = 2.0**-8  # of a bfloat16, relative


@cache
def program(form: Form, path: Path) -> Any:
    options: dict[str, Any] = form.options()
    if options["relative"] is not None:
        options["relative"] = jnp.asarray(options["relative"])
    if path == "native":
        return jax.jit(partial(native_split_attention, **options))
    follow = path == "follow_lengths"

    def attend(
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        table: jax.Array,
        start: jax.Array,
        length: jax.Array,
    ) -> jax.Array:
        work = attention_work(start, length, q.shape[0], follow_lengths=follow)
        rows = (LayerCache(keys, values), table, start, length, work)
        return split_attention(q, *rows, follow_lengths=follow, **options)

    return jax.jit(attend)


def attend(batch: Ragged, form: Form, path: Path) -> np.ndarray:
    return np.asarray(program(form, path)(*map(jnp.asarray, batch)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Form, list[tuple[int, int]]]:
    """A form, and the rows of a batch: tokens and keys."""
    form = draw(st.sampled_from(FORMS))
    n_keys = st.one_of(st.just(0), st.just(1), st.integers(2, MOST_KEYS))
    row = st.one_of(
        st.tuples(st.just(1), n_keys),
        st.tuples(st.integers(2, MOST_TOKENS), n_keys),
        st.integers(1, MOST_TOKENS).map(lambda n: (n, n)),  # an encoder's
    )
    rows: list[tuple[int, int]] = []
    for n, keys in draw(st.lists(row, min_size=1, max_size=MOST_ROWS)):
        if sum(m for m, _ in rows) + n <= MOST_TOKENS:
            rows.append((n, max(n, keys) if form.causal else keys))
    return form, rows


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=16)
@given(case=cases(), seed=st.integers(0, 2**31))
@example(case=(FORMS[0], [(1, 0), (3, 0), (2, 256), (40, 1), (1, 1), (1, 256)]), seed=0)
@example(case=(FORMS[1], [(70, 70), (1, 1), (20, 20)]), seed=0)
def test_equals_a_dense_softmax_for_each_query(
    path: Path, case: tuple[Form, list[tuple[int, int]]], seed: int
) -> None:
    form, rows = case
    batch = batch_of(rows, form, seed=seed)
    np.testing.assert_allclose(attend(batch, form, path), truth(batch, form), atol=2e-5, rtol=2e-5)


@pytest.mark.matrix(but=["form0-native", "form0-follow_lengths", "form0-static"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", [FORMS[0], FORMS[1], FORMS[4]])
def test_bfloat16_caches_have_float32_sums(path: Path, form: Form) -> None:
    rows = [(1, 256), (40, 75), (1, 1), (2, 2)]
    batch = batch_of(rows, form, seed=6)
    q, keys, values = (x.astype(ml_dtypes.bfloat16) for x in batch[:3])
    batch = batch._replace(q=q, k_cache=keys, v_cache=values)
    given = attend(batch, form, path)
    assert given.dtype == ml_dtypes.bfloat16
    # Pure JAX also rounds the scaled queries and the weights of values.
    error = HALF_UNIT if path == "native" else 4 * HALF_UNIT
    np.testing.assert_allclose(given.astype(np.float64), truth(batch, form), atol=error, rtol=error)
