"""Compares the kernel of latent attention, interpreted on the CPU, with the reference over ragged batches.

    PJRT_NPROC=16 python -m tests.device.pallas.interpreted_latent NAME SEED N

It compiles the sizes NAME once, and runs N random batches after one that is given. It prints each before it
runs it, and a line of JSON at the end. The first wrong batch ends it with an error; the same seed draws that
batch again.
"""

import faulthandler
import json
import sys
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import numpy as np

import tests.device.compiled_once  # noqa: F401
from orca_jax.pallas.latent_attention import latent_attention, latent_plan
from orca_jax.pallas.latent_attention_reference import latent_attention_reference
from orca_jax.pallas.mosaic_forms import InterpretGPUParams
from orca_jax.pallas.work_list.work_items import MERGE, work_items
from tests.device.model.ragged import ragged

# The kernel rounds its result, its weights before it multiplies with them, and the results of parts.
TOLERANCE = {"bfloat16": 2**-7, "float16": 2**-10}
GIVES_UP = 230.0  # seconds; deadlocked threads of a kernel would wait forever

Rows = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the compiled kernel, to which every batch is padded, and the first batch."""

    n_heads: int
    rank: int
    width: int
    block_size: int
    dtype: str
    n_cores: int
    rows: Rows
    n_tokens: int = 8
    n_rows: int = 4
    max_keys: int = 400
    fixed: bool = False


SIZES = {
    "small": Sizes(12, 128, 192, 32, "bfloat16", 2, ((1, 400), (2, 40)), n_tokens=4),
    "DeepSeek's, two groups": Sizes(128, 512, 576, 16, "bfloat16", 4, ((1, 400), (1, 48), (0, 0), (1, 65))),
    "sixteen heads, wide blocks": Sizes(16, 512, 576, 128, "float16", 3, ((1, 400), (3, 20))),
    "groups of 40": Sizes(80, 256, 320, 32, "bfloat16", 5, ((1, 399), (1, 3), (2, 64), (1, 128))),
    "fixed positions": Sizes(24, 128, 192, 64, "float16", 2, ((1, 400), (4, 290)), fixed=True),
}


class Compared:
    """The kernel and the reference for some sizes; both are compiled at the first batch."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.worst, self.n_merged = 0.0, 0
        shape = (sizes.n_tokens, sizes.n_rows, sizes.n_heads, sizes.block_size, sizes.n_cores)
        plan = latent_plan(*shape)
        self.plan = plan = plan.fixed(sizes.max_keys) if sizes.fixed else plan
        options = {"rank": sizes.rank, "scale": 0.7 * sizes.width**-0.5}

        @jax.jit
        def kernel(work: jax.Array, *arrays: jax.Array) -> jax.Array:
            return latent_attention(*arrays, **options, work=work, plan=plan, interpret=True)

        @jax.jit
        def reference(*arrays: jax.Array) -> jax.Array:
            wide = [x.astype(jnp.float32) for x in arrays[:2]]
            return latent_attention_reference(*wide, *arrays[2:], **options)

        self.kernel, self.reference = kernel, reference

    def check(self, rows: Rows, sharpness: float, drawn: int) -> None:
        """Compare one batch. With a high sharpness a query attends to one key, with a low one to all keys."""
        sizes = self.sizes
        print(f"{rows}, sharpness {sharpness}, drawn by {drawn}", flush=True)
        max_blocks = -(-sizes.max_keys // sizes.block_size)
        batch = ragged(
            drawn,
            rows,
            n_padding=sizes.n_tokens - sum(n for n, _ in rows),
            n_heads=sizes.n_heads,
            n_kv_heads=1,
            head_size=sizes.width,
            block_size=sizes.block_size,
            n_rows=sizes.n_rows,
            n_blocks=sizes.n_rows * max_blocks,
            max_blocks=max_blocks,
        )
        q, cache = (jnp.asarray(x, sizes.dtype) for x in batch[:2])
        arrays = (q * sharpness, cache, *map(jnp.asarray, batch[3:]))
        work = work_items(batch.row_start, batch.kv_length, self.plan)
        n_merged = int((work[self.plan.first_merge :, MERGE.token] < sizes.n_tokens).sum())
        assert n_merged or rows != sizes.rows, "the first batch must have split rows"
        self.n_merged += n_merged
        got = np.asarray(self.kernel(jnp.asarray(work), *arrays), np.float32)
        want = np.asarray(self.reference(*arrays), np.float32)
        end = batch.row_start[-1]
        assert not got[end:].any(), "padding is not zero"
        assert np.isfinite(got).all(), f"not finite: tokens {np.unique(np.nonzero(~np.isfinite(got))[0])}"
        error = np.abs(got - want)[:end] / (1 + np.abs(want[:end]))
        token, head, column = map(int, np.unravel_index(error.argmax(), error.shape))
        place = f"token {token}, head {head}, column {column}"
        assert error.max() < TOLERANCE[sizes.dtype], f"the error is {error.max():.2g} at {place}"
        self.worst = max(self.worst, float(error.max()))


def rows_of(rng: np.random.Generator, sizes: Sizes) -> Rows:
    """Random rows: decode, prompts, and rows without tokens."""
    rows, left = list[tuple[int, int]](), sizes.n_tokens
    for _ in range(rng.integers(1, sizes.n_rows + 1)):
        n = min(left, int(rng.choice([0, 1, 1, 1, 3])))
        left -= n
        rows.append((n, int(rng.integers(n, sizes.max_keys + 1)) if n else 0))
    return tuple(rows) if left < sizes.n_tokens else ((1, 77),)


def main() -> None:
    """Check the sizes of the given name, with batches from the given seed."""
    faulthandler.dump_traceback_later(GIVES_UP, exit=True)
    assert InterpretGPUParams().uninitialized_memory == "nan"  # of outputs that the kernel does not write
    sizes, rng = SIZES[sys.argv[1]], np.random.default_rng(int(sys.argv[2]))
    compared = Compared(sizes)
    compared.check(sizes.rows, 1.0, 7)
    for _ in range(int(sys.argv[3])):
        compared.check(rows_of(rng, sizes), float(rng.choice([0.01, 1.0, 8.0])), int(rng.integers(2**31)))
    print(json.dumps(asdict(sizes) | {"worst": compared.worst, "merged": compared.n_merged}))


if __name__ == "__main__":
    main()
