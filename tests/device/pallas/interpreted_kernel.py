"""Compares the kernel, interpreted on the CPU, with the reference over random ragged batches.

    PJRT_NPROC=16 python -m tests.device.pallas.interpreted_kernel NAME SEED

It compiles the sizes NAME once, and runs many batches. It prints each batch before it runs it, and a line of
JSON at the end. The first wrong batch ends it with an error; the same seed draws that batch again.
"""

import faulthandler
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis import strategies as st

import tests.device.compiled_once  # noqa: F401
from orca_jax.pallas.mosaic_forms import InterpretGPUParams
from orca_jax.pallas.split_attention import split_attention
from orca_jax.pallas.split_attention_reference import split_attention_reference
from orca_jax.pallas.work_list.bounds import Plan
from orca_jax.pallas.work_list.work_items import MERGE, work_items
from tests.device.model.ragged import ragged
from tests.device.pallas.grouped import Scores, by_group, forget

# The kernel rounds its result, and its weights before it multiplies with them; the reference does not.
TOLERANCE = {"bfloat16": 2**-7, "float16": 2**-10}
GIVES_UP = 230.0  # seconds; deadlocked threads of a kernel would wait forever

PLAIN = Scores()

Rows = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the compiled kernel; every batch is padded to them."""

    n_heads: int
    n_kv_heads: int
    head_size: int
    block_size: int
    dtype: str
    scores: Scores = PLAIN
    n_tokens: int = 160
    n_rows: int = 8
    max_keys: int = 640  # of a row: five slots of the ring
    n_keys: int = 2048  # of all rows together
    n_cores: int = 2

    def fit(self, rows: Sequence[tuple[int, int]]) -> Rows:
        """The first rows that fit."""
        kept = list[tuple[int, int]]()
        n_tokens, n_blocks = self.n_tokens, self.n_keys // self.block_size
        for n, n_keys in rows[: self.n_rows]:
            n_tokens, n_blocks = n_tokens - n, n_blocks + -n_keys // self.block_size
            if n_tokens < 0 or n_blocks < 0:
                break
            kept.append((n, n_keys))
        return tuple(kept)


SIZES = {
    "heads of 64, groups of 2": Sizes(4, 2, 64, 16, "bfloat16", n_cores=5),
    "heads of 80, groups of 1, window": Sizes(2, 2, 80, 32, "float16", Scores(window=300), n_cores=3),
    "heads of 96, groups of 1, scale": Sizes(2, 2, 96, 64, "bfloat16", Scores(scale=0.25), n_cores=3),
    "heads of 128, groups of 8, cap": Sizes(8, 1, 128, 128, "float16", Scores(soft_cap=3.0), n_cores=3),
    "heads of 256, groups of 3, window, cap": Sizes(
        6, 2, 256, 16, "bfloat16", Scores(window=37, soft_cap=5.0), n_cores=1
    ),
    "heads of 64, groups of 16, window": Sizes(16, 1, 64, 16, "bfloat16", Scores(window=150), n_cores=2),
    "one token": Sizes(4, 2, 64, 16, "float16", n_tokens=1, n_rows=1),
}


def rows_of(sizes: Sizes) -> st.SearchStrategy[Rows]:
    """Random rows: decode, whole prompts, prompt chunks, and rows without tokens."""
    keys = st.integers(1, sizes.max_keys)
    prompt = st.integers(2, max(2, sizes.n_tokens))
    cached = st.integers(1, sizes.max_keys - sizes.n_tokens)
    row = st.one_of(
        st.tuples(st.just(1), keys),
        prompt.map(lambda n: (n, n)),
        st.tuples(prompt, cached).map(lambda both: (both[0], sum(both))),
        st.just((0, 0)),
    )
    return st.lists(row, min_size=3, max_size=8).map(sizes.fit)


class Compared:
    """The kernel and the reference for some sizes; both are compiled at the first batch."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.n_batches, self.worst = 0, 0.0
        self.rows_merged = self.tiles_merged = 0
        group = sizes.n_heads // sizes.n_kv_heads
        heads = (sizes.n_kv_heads, group)
        options = {"n_cores": sizes.n_cores, "window": sizes.scores.window}
        plan = Plan(sizes.n_tokens, sizes.n_rows, *heads, sizes.block_size, **options)
        self.plan = plan

        @jax.jit
        def kernel(work: jax.Array, *arrays: jax.Array) -> jax.Array:
            return split_attention(*arrays, **sizes.scores._asdict(), work=work, plan=plan, interpret=True)

        @jax.jit
        def reference(*arrays: jax.Array) -> jax.Array:
            wide = [x.astype(jnp.float32) for x in arrays[:3]]
            return split_attention_reference(*wide, *arrays[3:], group=group, **sizes.scores._asdict())

        self.kernel, self.reference = kernel, reference

    def check(self, rows: Rows, n_shared: int, sharpness: float, drawn: int) -> None:
        """Compare one batch. With a high sharpness a query attends to one key, with a low one to all keys."""
        sizes = self.sizes
        print(f"{rows}, {n_shared} shared blocks, sharpness {sharpness}, drawn by {drawn}", flush=True)
        batch = ragged(
            drawn,
            rows,
            n_padding=sizes.n_tokens - sum(n for n, _ in rows),
            n_heads=sizes.n_heads,
            n_kv_heads=sizes.n_kv_heads,
            head_size=sizes.head_size,
            block_size=sizes.block_size,
            n_shared=n_shared,
            n_rows=sizes.n_rows,
            n_blocks=sizes.n_keys // sizes.block_size + 2,
            max_blocks=-(-sizes.max_keys // sizes.block_size),
        )
        q = by_group(batch.q, sizes.n_kv_heads)
        fused = np.pad(q, ((0, 0), (0, 2), (0, 0), (0, 0)), constant_values=np.nan)  # keys and values
        batch = batch._replace(q=fused)
        if sizes.scores.window is not None:
            batch = forget(batch, sizes.scores.window, sizes.block_size)
        q, *caches = [jnp.asarray(x, sizes.dtype) for x in batch[:3]]
        arrays = (q * sharpness, *caches, *map(jnp.asarray, batch[3:]))
        work = work_items(batch.row_start, batch.kv_length, self.plan)
        merged = work[self.plan.first_merge :, MERGE.token] < sizes.n_tokens
        self.rows_merged += int(merged[: self.plan.n_merges].sum())
        self.tiles_merged += int(merged[self.plan.n_merges :].sum())
        got = np.asarray(self.kernel(jnp.asarray(work), *arrays), np.float32)
        want = np.asarray(self.reference(*arrays), np.float32)
        end = batch.row_start[-1]
        assert not got[end:].any(), "padding is not zero"
        assert np.isfinite(got).all(), f"not finite: tokens {np.unique(np.nonzero(~np.isfinite(got))[0])}"
        error = np.abs(got - want)[:end] / (1 + np.abs(want[:end]))
        if error.size:
            token, *head, column = map(int, np.unravel_index(error.argmax(), error.shape))
            place = f"token {token}, head {head}, column {column}"
            assert error.max() < TOLERANCE[sizes.dtype], f"the error is {error.max():.2g} at {place}"
            self.worst = max(self.worst, float(error.max()))
        self.n_batches += 1


def main() -> None:
    """Check the sizes of the given name, with batches from the given seed."""
    faulthandler.dump_traceback_later(GIVES_UP, exit=True)
    assert InterpretGPUParams().uninitialized_memory == "nan"  # of outputs that the kernel does not write
    sizes = SIZES[sys.argv[1]]
    compared = Compared(sizes)

    # No shrinking: each attempt takes seconds.
    @settings(
        max_examples=5,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
    )
    @seed(int(sys.argv[2]))
    @example(sizes.fit(((1, 640), (130, 130), (1, 1), (0, 0), (9, 200), (1, 321))), 3, 1.0, 7)
    @example(sizes.fit(((33, 640), (0, 0), (33, 640), (33, 640))), 2, 0.01, 16581)  # tiles are merged
    @example(sizes.fit(((1, 640),)), 0, 1.0, 9)
    @given(rows_of(sizes), st.integers(0, 5), st.sampled_from([0.01, 1.0, 8.0]), st.integers(0, 2**32 - 1))
    def check(rows: Rows, n_shared: int, sharpness: float, drawn: int) -> None:
        compared.check(rows, n_shared, sharpness, drawn)

    check()
    counts = {"rows_merged": compared.rows_merged, "tiles_merged": compared.tiles_merged}
    print(json.dumps(asdict(sizes) | {"batches": compared.n_batches, "worst": compared.worst} | counts))


if __name__ == "__main__":
    main()
