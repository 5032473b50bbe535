"""Hugging Face's transformers in static batches, as a plain script would use it; an environment of its own.

Requests go in batches of `batch` in their order; each batch is padded to its longest prompt and runs until
the longest of its outputs is done.
"""

# pyright: reportMissingImports=false
import platform
from typing import Any

import torch
import transformers

from bench.peers.child import Play, serve


def start(flags: dict[str, Any]) -> tuple[Play, dict[str, Any]]:
    """`flags`: checkpoint, cores, and perhaps batch."""
    torch.set_num_threads(flags["cores"])
    batch = flags.get("batch", 8)
    model = transformers.AutoModelForCausalLM.from_pretrained(flags["checkpoint"], dtype=torch.float32).eval()

    def play(prompts: list[list[int]], n_outputs: list[int]) -> int:
        n_tokens = 0
        for begin in range(0, len(prompts), batch):
            some, wanted = prompts[begin : begin + batch], n_outputs[begin : begin + batch]
            width = max(map(len, some))
            ids = torch.tensor([[0] * (width - len(one)) + one for one in some])
            mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in some])
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=mask,
                    do_sample=False,
                    min_new_tokens=max(wanted),
                    max_new_tokens=max(wanted),
                    pad_token_id=0,
                )
            assert out.shape[1] == width + max(wanted)
            n_tokens += sum(wanted)  # what a batch computes beyond them nobody wanted
        return n_tokens

    versions = (
        f"transformers {transformers.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )
    return play, {"versions": versions, "flags": {"batch": batch, "threads": flags["cores"]}}


if __name__ == "__main__":
    serve(start)
