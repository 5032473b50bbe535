"""The kernel over random ragged batches against float64: every head size, dtype and block size.

Each batch has both phases, pieces of prompts after a cached prefix, empty rows, padding, shared blocks, and
NaN in all unused slots. If the allocator reuses memory, the result's memory is filled with NaN before a run.
The same batch runs several times: a result that changes reveals a race.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel.oracle import Batch, attend_float64, errors, random_batch
from bench.kernel.shapes import Scale

Attend = Callable[..., jax.Array]  # split_attention's six arrays


@dataclass(frozen=True, slots=True)
class Room:
    """The size of a batch: tokens, rows, keys of the longest row and of all; and the number of runs."""

    n_tokens: int = 768
    n_rows: int = 16
    longest: int = 1536
    n_keys: int = 9216
    n_runs: int = 5


ROOM, TINY_ROOM = Room(), Room(n_tokens=96, n_rows=12, longest=256, n_keys=2048, n_runs=2)


@dataclass(frozen=True, slots=True)
class Form:
    """One size of the kernel."""

    head_size: int
    dtype: str
    block_size: int
    n_heads: int
    n_kv_heads: int
    room: Room = ROOM

    @property
    def name(self) -> str:
        """Like `D 128 bfloat16 B 16 N 8 K 2`."""
        return f"D {self.head_size} {self.dtype} B {self.block_size} N {self.n_heads} K {self.n_kv_heads}"

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest row."""
        return self.room.longest // self.block_size

    @property
    def n_blocks(self) -> int:
        """Blocks for all rows, each with a partial last block, and some unused ones."""
        return self.room.n_keys // self.block_size + self.room.n_rows + 4

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes of split_attention's six arrays."""
        cache = (self.n_blocks, self.n_kv_heads, self.block_size, self.head_size)
        n_rows = self.room.n_rows
        floats = ((self.room.n_tokens, self.n_heads, self.head_size), cache, cache)
        indices = ((n_rows, self.max_blocks), (n_rows + 1,), (n_rows,))
        return (
            *(jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype)) for shape in floats),
            *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in indices),
        )


@dataclass(frozen=True, slots=True)
class Found:
    """The results of a form's runs; in `poisoned` of them the result reused memory that held NaN."""

    relative: float
    largest: float
    finite: bool
    padding_zero: bool
    n_runs: int
    n_equal: int
    poisoned: int


def forms(scale: Scale) -> list[Form]:
    """Every head size, dtype and block size, each with groups of 1 and alternately groups of 4, 16 or 3."""
    if scale == "tiny":
        return [
            Form(80, "bfloat16", 16, 2, 2, TINY_ROOM),
            Form(64, "float16", 64, 4, 1, TINY_ROOM),
        ]
    groups = ((8, 2), (16, 1), (12, 4))
    sizes = [
        (head_size, dtype, block_size)
        for block_size in ((16,) if scale == "quick" else (16, 64, 128))
        for dtype in ("bfloat16", "float16")
        for head_size in (128, 64, 80, 96, 256)
    ]
    return [
        Form(*size, *heads) for i, size in enumerate(sizes) for heads in ((8, 8), groups[i % len(groups)])
    ]


def form_named(name: str, scale: Scale) -> Form:
    """The form of this name."""
    return next(form for form in forms(scale) if form.name == name)


def random_rows(rng: np.random.Generator, room: Room) -> list[tuple[int, int]]:
    """Rows (query tokens, keys) of every kind, with some fewer tokens than fit."""
    most = room.longest
    short, prompt, piece = most // 8, room.n_tokens // 4, room.n_tokens // 5
    increments = [(1, int(n)) for n in rng.integers(1, most + 1, 3)] + [(1, most), (1, 1)]
    increments += [(1, int(n)) for n in rng.integers(1, short, 1 if room is TINY_ROOM else 3)]
    prompts = [(int(n), int(n)) for n in rng.integers(2, prompt, 2)]
    pieces = [(int(n), int(n + rng.integers(1, most // 5))) for n in rng.integers(2, piece, 2)]
    nothing = [(0, 0), (0, 0)]
    rows = increments + prompts + pieces + nothing
    rows += [(1, min(64, short))] * (room.n_rows - len(rows))
    return [rows[i] for i in rng.permutation(room.n_rows)]


def draw(form: Form, seed: int) -> Batch:
    """A fresh batch."""
    rng = np.random.default_rng(seed)
    return random_batch(
        rng,
        random_rows(rng, form.room),
        n_tokens=form.room.n_tokens,
        n_heads=form.n_heads,
        n_kv_heads=form.n_kv_heads,
        head_size=form.head_size,
        block_size=form.block_size,
        max_blocks=form.max_blocks,
        n_blocks=form.n_blocks,
        dtype=jnp.dtype(form.dtype),
    )


def check(form: Form, attend: Attend, seed: int) -> dict[str, Any]:
    """Run `attend` on a fresh batch several times; returns the fields of Found."""
    batch = draw(form, seed)
    arrays = [jnp.asarray(a) for a in batch]
    results, poisoned = [], 0
    for _ in range(form.room.n_runs):
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
    """The array's address, if the runtime reveals it."""
    try:
        return array.unsafe_buffer_pointer()
    except (AttributeError, RuntimeError, ValueError):
        return None
