"""The pooled parts of an iteration have exactly its pooled tokens, each at its place."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.iteration.message import POOLS_ALL, POOLS_FIRST, POOLS_LAST
from orca_jax.iteration.rows.pooled import pooled_parts
from orca_jax.iteration.rows.scored import SCORED
from orca_jax.iteration.shape import EngineShape
from tests.host.control.test_message_wire import ONE, message_of

SHAPE = EngineShape(
    block_size=128, max_blocks=8, max_rows=6, max_tokens=4096, n_rows=12, n_blocks=64, vocab_size=300
)
FLAGS = (0, POOLS_LAST, POOLS_FIRST, POOLS_ALL)
ROWS = st.tuples(st.integers(1, 300), st.integers(0, 300), st.sampled_from(FLAGS))


@given(rows=st.lists(ROWS, min_size=1, max_size=6), deterministic=st.booleans(), causal=st.booleans())
def test_each_pooled_token_is_in_one_part(
    rows: list[tuple[int, int, int]], deterministic: bool, causal: bool
) -> None:
    message = message_of(
        [
            {
                **{**ONE, "initiation": True, "n_prompt": n + before, "flags": flags},
                **{"kv_length": n + before, "token_ids": [1] * n, "blocks": [i + 1, i + 7]},
            }
            for i, (n, before, flags) in enumerate(rows)
        ]
    )
    ends = np.cumsum([n for n, _, _ in rows]).tolist()
    expected = {
        (i, before + n - 1 - back, end - 1 - back)
        for i, ((n, before, flags), end) in enumerate(zip(rows, ends, strict=True))
        for back in {0: (), POOLS_LAST: (0,), POOLS_FIRST: (n - 1,), POOLS_ALL: range(n)}[flags]
    }
    found: list[tuple[int, int, int]] = []
    shape = replace(SHAPE, deterministic=deterministic)
    parts = list(pooled_parts(message, message.n_pooled, shape, causal=causal))
    for places, at, flat in parts:
        arrays = flat.arrays
        assert flat.n_tokens <= SCORED and flat.n_rows == len(places) <= flat.layout.n_rows
        assert arrays.row_start[len(places) :].tolist() == [flat.n_tokens] * (
            len(arrays.row_start) - len(places)
        )
        for i, place in enumerate(places):
            own = slice(arrays.row_start[i], arrays.row_start[i + 1])
            positions = arrays.positions[own].tolist()
            assert arrays.kv_length[i] == (positions[-1] + 1 if causal else message.kv_length[place])
            assert arrays.block_table[i].tolist() == message.block_table[place].tolist()
            found += [(place, *pair) for pair in zip(positions, at[own].tolist(), strict=True)]
    assert sorted(found) == sorted(expected)
    if deterministic:
        assert all(len(places) == 1 for places, _, _ in parts)
    else:
        assert len(parts) == -(-len(expected) // SCORED)  # none is left half empty
