"""Runs the kernel in one form on one random batch, for a tool that checks memory accesses.

    export XLA_PYTHON_CLIENT_ALLOCATOR=platform
    compute-sanitizer --tool memcheck --error-exitcode 9 python -m bench.kernel.one_form

With that allocator each array is a separate allocation, so the tool sees accesses past its end. The exit
status is 1 if the result is wrong.
"""

import argparse
import json
import sys
from dataclasses import replace

import jax

from bench.kernel.aims import RELATIVE_ERROR
from bench.kernel.correctness import TINY_ROOM, Form
from bench.kernel.run import checked, form_program


def main() -> None:
    """Compile, run, compare with float64, and print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernel.one_form", description=__doc__)
    parser.add_argument("--head-size", type=int, default=80)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--window", type=int, default=None)
    parser.add_argument("--soft-cap", type=float, default=None)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--interpret", action="store_true", help="on the CPU")
    flags = parser.parse_args()
    room = replace(TINY_ROOM, n_runs=1)
    sizes = (flags.head_size, flags.dtype, flags.block_size, flags.heads, flags.kv_heads)
    form = Form(*sizes, room, window=flags.window, soft_cap=flags.soft_cap)
    n_cores = 1 if flags.interpret else int(getattr(jax.devices()[0], "core_count", 132))
    kernel, shapes = form_program(form, n_cores, interpret=flags.interpret)
    found = checked(form, kernel.lower(*shapes).compile(), n_cores, seed=1)
    print(json.dumps({"form": form.name, **found}))
    sound = found["relative"] <= RELATIVE_ERROR and found["finite"] and found["padding_zero"]
    sys.exit(0 if sound else 1)


if __name__ == "__main__":
    main()
