"""Compiles the sampling programs for an H200 that need not be present: memory, kernels, loops.

    JAX_PLATFORMS=cpu python -m bench.compiled.compile_sampler [--rows 32] [--vocab 50257]

Nothing is run; the extra `cuda` installs the compiler. Look for two costs: a loop with an
unknown trip count makes the device ask its host at each trip, and a temporary as large as the logits is
written and read again. The last line is JSON.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from orca_jax.aot.described_gpu import on_h200
from orca_jax.execution.sampling import Tables, TokenChooser
from orca_jax.grammar.token_mask import n_words
from orca_jax.iteration.flat_batch import Sampler, SamplerArrays


def lowered_programs(
    n_rows: int, vocab_size: int, place: jax.sharding.Sharding
) -> dict[str, jax.stages.Lowered]:
    """Each of the chooser's programs for `n_rows`, with two batches' rows in its tables."""

    def like(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    # Its arrays are here and are not used; its programs are lowered for `place`.
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    chooser = TokenChooser(vocab_size, 1, here, native=False)
    logits, last_token = like((n_rows, vocab_size), jnp.float32), like((2 * n_rows,), jnp.int32)
    rows = like((len(SamplerArrays._fields), n_rows), jnp.int32)
    table = (2 * n_rows, vocab_size)
    tables = Tables(like(table, jnp.int32), like(table, jnp.float32))
    programs = {
        "adjust": chooser._adjust.lower(logits, rows, tables, last_token),
        "allow": chooser._allow.lower(logits, like((n_rows, n_words(vocab_size)), jnp.int32)),
    }
    for sampler in get_args(Sampler):
        programs[sampler] = chooser._choose.lower(logits, logits, rows, last_token, sampler=sampler)
    programs["logprobs"] = chooser._logprobs.lower(logits, rows, like((n_rows,), jnp.int32))
    values = like((vocab_size,), jnp.int32), like((vocab_size,), jnp.float32)
    programs["set a row up"] = chooser._set_row.lower(tables, like((), jnp.int32), *values)
    return programs


def figures(name: str, program: jax.stages.Lowered) -> dict[str, Any]:
    """Properties of the compiled program; bytes and counts."""
    compiled = program.compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    entry = text.split("ENTRY", 1)[1]
    loops = len(re.findall(r" while\(", text))
    return {
        "program": name,
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "fusions": len(re.findall(r" fusion\(", entry)),
        "loops": loops,
        "host_led_loops": loops - len(re.findall("known_trip_count", text)),
        "sorts": len(re.findall(r" sort\(", text)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="the sampling programs, compiled for an H200")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=50257)
    args = parser.parse_args(argv)
    results = [
        figures(name, program) for name, program in lowered_programs(args.rows, args.vocab, on_h200()).items()
    ]
    table = Table(title=f"H200, {args.rows} rows, {args.vocab:,} tokens")
    for column in ("program", "arguments, MB", "temporaries, MB", "fusions", "loops", "host-led", "sorts"):
        table.add_column(column, justify="left" if column == "program" else "right")
    for one in results:
        sizes = (f"{one[name] / 1e6:.2f}" for name in ("arguments", "temporaries"))
        counts = (str(one[name]) for name in ("fusions", "loops", "host_led_loops", "sorts"))
        table.add_row(one["program"], *sizes, *counts)
    Console(width=120).print(table)
    print(json.dumps({"rows": args.rows, "vocab": args.vocab, "jax": jax.__version__, "programs": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
