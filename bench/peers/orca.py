"""This engine, offline, all requests at once."""

import platform
from typing import Any

import jax

from bench.peers.child import Play, serve
from orca_jax import LLM, SamplingParams


def start(flags: dict[str, Any]) -> tuple[Play, dict[str, Any]]:
    """`flags`: checkpoint, max_rows, and perhaps more arguments of LLM."""
    # All that any iteration needs is compiled before the first is timed.
    arguments = {"max_batch_size": flags["max_rows"], "compile_ahead": True, **flags.get("arguments", {})}
    llm = LLM(flags["checkpoint"], dtype="float32", **arguments)

    def play(prompts: list[list[int]], n_outputs: list[int]) -> int:
        params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in n_outputs]
        return sum(len(result.token_ids) for result in llm.generate(prompts, params))

    versions = f"jax {jax.__version__}, Python {platform.python_version()}"
    return play, {"versions": versions, "flags": arguments}


if __name__ == "__main__":
    serve(start)
