"""One ragged batch through the kernel, interpreted on the CPU, beside the reference: a line of JSON.

PJRT_NPROC=16 python -m tests.device.interpreted_kernel CASE
"""

import json
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.pallas.split_attention import split_attention
from orca_jax.pallas.split_attention_reference import split_attention_reference
from orca_jax.pallas.work_items import Plan, work_items
from tests.device.ragged import ragged

TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3}  # two roundings of a number of about 2


@dataclass(frozen=True, slots=True)
class Case:
    """Rows as `ragged` has them, and the sizes."""

    rows: tuple[tuple[int, int], ...]
    n_heads: int = 4
    n_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    dtype: str = "bfloat16"
    n_shared: int = 0
    n_cores: int = 2


CASES = {
    "both phases in one launch": Case(((1, 300), (70, 90), (1, 1), (130, 130), (1, 64))),
    "all heads in one group, shared blocks": Case(
        ((1, 200), (1, 230), (5, 37)), n_heads=8, n_kv_heads=1, n_shared=3, dtype="float16"
    ),
    "large blocks, a piece behind a cached beginning": Case(((40, 200), (1, 129)), block_size=128),
}


def main() -> None:
    """Run the case that is named."""
    case = CASES[sys.argv[1]]
    batch = ragged(
        7,
        case.rows,
        n_padding=3,
        n_heads=case.n_heads,
        n_kv_heads=case.n_kv_heads,
        head_size=case.head_size,
        block_size=case.block_size,
        n_shared=case.n_shared,
    )
    floats = [jnp.asarray(x, case.dtype) for x in batch[:3]]
    indices = [jnp.asarray(x) for x in batch[3:]]
    n_tokens = len(batch.q)
    group = case.n_heads // case.n_kv_heads
    plan = Plan(n_tokens, len(batch.kv_length), case.n_kv_heads, group, n_cores=case.n_cores)

    @jax.jit
    def run(*arrays: jax.Array) -> jax.Array:
        _, row_start, kv_length = arrays[3:]
        work = work_items(row_start, kv_length, plan)
        return split_attention(*arrays, work=work, plan=plan, interpret=True)

    got = np.asarray(run(*floats, *indices), np.float32)
    want = np.asarray(split_attention_reference(*floats, *indices), np.float32)
    end = batch.row_start[-1]
    found = {
        "dtype": case.dtype,
        "finite": bool(np.isfinite(got).all()),
        "error": float(np.abs(got[:end] - want[:end]).max()),
        "padding": float(np.abs(got[end:]).max()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
