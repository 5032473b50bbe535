"""The kernel against float64 over random ragged batches: every head size, dtype and block size.

Each batch has prompts, pieces of prompts after a cached beginning, decode rows, rows without tokens, padding,
shared blocks, and NaN in everything unused. If the allocator gives the result's memory back, it is filled
with NaN before a run. The same batch runs several times: a result that changes is a race.
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
    """The largest batch: tokens, rows, keys of one row and of all rows; and the number of runs."""

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
    window: int | None = None
    soft_cap: float | None = None

    @property
    def name(self) -> str:
        """The form's name, such as `D 128 bfloat16 B 16 N 8 K 2 window 300`."""
        sizes = f"D {self.head_size} {self.dtype} B {self.block_size} N {self.n_heads} K {self.n_kv_heads}"
        window = "" if self.window is None else f" window {self.window}"
        return sizes + window + ("" if self.soft_cap is None else f" cap {self.soft_cap:g}")

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest row."""
        return self.room.longest // self.block_size

    @property
    def n_blocks(self) -> int:
        """Blocks for all rows, the last of each partly filled, and a few unused ones."""
        return self.room.n_keys // self.block_size + self.room.n_rows + 4

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes of split_attention's six arrays."""
        cache = (self.n_blocks, self.n_kv_heads, self.block_size, self.head_size)
        n_rows = self.room.n_rows
        q = (self.room.n_tokens, self.n_heads // self.n_kv_heads, self.n_kv_heads, self.head_size)
        floats = (q, cache, cache)
        indices = ((n_rows, self.max_blocks), (n_rows + 1,), (n_rows,))
        return (
            *(jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype)) for shape in floats),
            *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in indices),
        )


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a form's runs; `poisoned` counts those whose result's memory held NaN before."""

    relative: float
    largest: float
    finite: bool
    padding_zero: bool
    n_runs: int
    n_equal: int
    poisoned: int


def forms(scale: Scale) -> list[Form]:
    """Every head size and dtype with every block size, each with groups of 1 and with larger groups.

    The larger groups have 4, 16 and 3 heads in turn, and in turn a window, a soft cap, both, or neither.
    """
    if scale == "tiny":
        return [
            Form(80, "bfloat16", 16, 2, 2, TINY_ROOM),
            Form(64, "float16", 64, 4, 1, TINY_ROOM, window=50, soft_cap=5.0),
        ]
    groups = ((8, 2), (16, 1), (12, 4))
    scores = ((None, None), (300, None), (300, 20.0), (None, 20.0))
    sizes = [
        (head_size, dtype, block_size)
        for block_size in ((16,) if scale == "quick" else (16, 64, 128))
        for dtype in ("bfloat16", "float16")
        for head_size in (128, 64, 80, 96, 256)
    ]
    plain = [Form(*size, 8, 8) for size in sizes]
    grouped = [
        Form(*size, *groups[i % len(groups)], ROOM, *scores[i % len(scores)]) for i, size in enumerate(sizes)
    ]
    return [form for both in zip(plain, grouped, strict=True) for form in both]


def form_named(name: str, scale: Scale) -> Form:
    """The form of `forms` with that name."""
    return next(form for form in forms(scale) if form.name == name)


def random_rows(rng: np.random.Generator, room: Room) -> list[tuple[int, int]]:
    """Rows (query tokens, keys) of every kind, a few tokens fewer than the room has."""
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
    """A random batch."""
    rng = np.random.default_rng(seed)
    return random_batch(
        rng,
        random_rows(rng, form.room),
        n_tokens=form.room.n_tokens,
        group=form.n_heads // form.n_kv_heads,
        n_kv_heads=form.n_kv_heads,
        head_size=form.head_size,
        block_size=form.block_size,
        max_blocks=form.max_blocks,
        n_blocks=form.n_blocks,
        dtype=jnp.dtype(form.dtype),
    )


def check(form: Form, attend: Attend, seed: int) -> dict[str, Any]:
    """Run `attend` on a random batch, several times. Returns the fields of Found."""
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
    true = attend_float64(batch, window=form.window, soft_cap=form.soft_cap)
    found = errors(first[:end].astype(np.float32), true[:end])
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
    """The array's address, if the runtime tells it."""
    try:
        return array.unsafe_buffer_pointer()
    except (AttributeError, RuntimeError, ValueError):
        return None
