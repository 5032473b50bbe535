"""The kernel over random ragged batches against float64: every head size, dtype and block size.

Each batch has both phases, pieces of prompts behind a cached beginning, rows of no length, padding, shared
blocks, and NaN wherever nothing is. The result's memory is filled with NaN before a run where the allocator
gives it back. The same batch is run several times: a result that moves is a race.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel.oracle import Batch, attend_float64, errors, random_batch

N_TOKENS, N_ROWS, LONGEST, N_KEYS = 768, 16, 1536, 9216  # N_KEYS bounds the sum over rows
_RUNS = 5

Attend = Callable[..., jax.Array]  # split_attention's six arrays


@dataclass(frozen=True, slots=True)
class Form:
    """One size of the kernel."""

    head_size: int
    dtype: str
    block_size: int
    n_heads: int
    n_kv_heads: int

    @property
    def name(self) -> str:
        """Like `D 128 bfloat16 B 16 N 8 K 2`."""
        return f"D {self.head_size} {self.dtype} B {self.block_size} N {self.n_heads} K {self.n_kv_heads}"

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest row."""
        return LONGEST // self.block_size

    @property
    def n_blocks(self) -> int:
        """Blocks for all rows, the last one of each not full, and some that nobody has."""
        return N_KEYS // self.block_size + N_ROWS + 4

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of split_attention's six arrays."""
        cache = (self.n_blocks, self.n_kv_heads, self.block_size, self.head_size)
        floats = ((N_TOKENS, self.n_heads, self.head_size), cache, cache)
        indices = ((N_ROWS, self.max_blocks), (N_ROWS + 1,), (N_ROWS,))
        return (
            *(jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype)) for shape in floats),
            *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in indices),
        )


@dataclass(frozen=True, slots=True)
class Found:
    """What a form's runs showed; `poisoned`: in how many the result lay in memory that held NaN before."""

    relative: float
    largest: float
    finite: bool
    padding_zero: bool
    n_runs: int
    n_equal: int
    poisoned: int


def forms(*, quick: bool) -> list[Form]:
    """Every head size and dtype with every block size; groups of 1, 4, 16 and 3 heads in turn."""
    groups = ((8, 8), (8, 2), (16, 1), (12, 4))
    sizes = [
        (head_size, dtype, block_size)
        for block_size in ((16,) if quick else (16, 64, 128))
        for dtype in ("bfloat16", "float16")
        for head_size in (128, 64, 80, 96, 256)
    ]
    return [Form(*size, *groups[i % 4]) for i, size in enumerate(sizes)]


def random_rows(rng: np.random.Generator) -> list[tuple[int, int]]:
    """N_ROWS rows (query tokens, keys), some tokens fewer than N_TOKENS."""
    increments = [(1, int(n)) for n in rng.integers(1, LONGEST + 1, 3)] + [(1, LONGEST), (1, 1)]
    increments += [(1, int(n)) for n in rng.integers(1, 200, 3)]
    prompts = [(int(n), int(n)) for n in rng.integers(2, 200, 2)]
    pieces = [(int(n), int(n + rng.integers(1, 300))) for n in rng.integers(2, 150, 2)]
    nothing = [(0, 0), (0, 0)]
    rows = increments + prompts + pieces + nothing
    rows += [(1, 64)] * (N_ROWS - len(rows))
    return [rows[i] for i in rng.permutation(N_ROWS)]


def draw(form: Form, seed: int) -> Batch:
    """A fresh batch."""
    rng = np.random.default_rng(seed)
    return random_batch(
        rng,
        random_rows(rng),
        n_tokens=N_TOKENS,
        n_heads=form.n_heads,
        n_kv_heads=form.n_kv_heads,
        head_size=form.head_size,
        block_size=form.block_size,
        max_blocks=form.max_blocks,
        n_blocks=form.n_blocks,
        dtype=jnp.dtype(form.dtype),
    )


def check(form: Form, attend: Attend, seed: int) -> dict[str, Any]:
    """Run `attend` on a fresh batch, several times: the fields of Found."""
    batch = draw(form, seed)
    arrays = [jnp.asarray(a) for a in batch]
    results, poisoned = [], 0
    for _ in range(_RUNS):
        poison = jax.block_until_ready(jnp.full(batch.q.shape, jnp.nan, batch.q.dtype))
        was = _address(poison)
        poison.delete()
        out = jax.block_until_ready(attend(*arrays))
        poisoned += was is not None and _address(out) == was
        results.append(np.asarray(out))
        del out
    first = results[0]
    end = int(batch.row_start[-1])
    found = errors(first[:end].astype(np.float32), attend_float64(batch)[:end])
    same = [np.array_equal(first.view(np.uint16), other.view(np.uint16)) for other in results]
    return asdict(
        Found(
            relative=found.relative,
            largest=found.largest,
            finite=bool(np.isfinite(first.astype(np.float32)).all()),
            padding_zero=not first[end:].astype(np.float32).any(),
            n_runs=len(results),
            n_equal=sum(same),
            poisoned=poisoned,
        )
    )


def _address(array: jax.Array) -> int | None:
    """Where the array lies, where the runtime tells."""
    try:
        return array.unsafe_buffer_pointer()
    except (AttributeError, RuntimeError, ValueError):
        return None
