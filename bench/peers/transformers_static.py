"""Hugging Face's transformers in static batches, as a simple server would use it, in its own environment.

A batch is the oldest `batch` requests that have arrived when the batch before is done; with `sorted` all that
have arrived are put into batches by their lengths. It is padded to its longest prompt, runs until the longest
of its outputs is done, and then everything is delivered. With `compiled` the keys and values lie in a static
cache of the model's length and a batch always has `batch` rows, so that `generate` compiles decode with CUDA
graphs on a GPU.
"""

# pyright: reportMissingImports=false
import platform
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import transformers

from bench.peers.child import Play, Playing, serve


def start(flags: dict[str, Any], closing: ExitStack) -> tuple[Play, dict[str, Any]]:
    """`flags`: checkpoint, dtype, cores, optionally compiled; `arguments` may have batch, attention,
    beams and sorted.
    """
    torch.set_num_threads(flags["cores"])
    settings = {"batch": 8, "attention": "sdpa", "beams": 1, "sorted": False, **flags.get("arguments", {})}
    batch, compiled = settings["batch"], flags.get("compiled", False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    encodes = transformers.AutoConfig.from_pretrained(flags["checkpoint"]).is_encoder_decoder
    auto = transformers.AutoModelForSeq2SeqLM if encodes else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(
        flags["checkpoint"], dtype=getattr(torch, flags["dtype"]), attn_implementation=settings["attention"]
    )
    model = model.to(device).eval()
    model.generation_config.eos_token_id = None  # every output has its requested length
    more: dict[str, Any] = {}
    if compiled:
        more = {"cache_implementation": "static", "max_cache_len": model.config.max_position_embeddings}

    def play(playing: Playing) -> None:
        while indices := playing.next_arrivals(None if settings["sorted"] else batch):
            if settings["sorted"]:
                indices.sort(key=lambda i: len(playing.requests[i].prompt))
            for first in range(0, len(indices), batch):
                run(playing, indices[first : first + batch])

    def run(playing: Playing, indices: list[int]) -> None:
        some = [playing.requests[i] for i in indices]
        if compiled:
            some += [some[-1]] * (batch - len(some))
        width = max(len(request.prompt) for request in some)
        wanted = max(request.n_output for request in some)
        ids = [padded(request.prompt, width) for request in some]
        mask = [padded([1] * len(request.prompt), width) for request in some]
        with torch.inference_mode():
            out = model.generate(
                torch.tensor(ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
                do_sample=False,
                num_beams=settings["beams"],
                max_new_tokens=wanted,
                pad_token_id=0,
                **more,
            )
        # Drop the tokens that the batch generated after a request's own output.
        rows = out[:, 1 if encodes else width :].tolist()
        for i, row in zip(indices, rows, strict=False):
            playing.done(i, row[: playing.requests[i].n_output])

    def padded(values: Sequence[int], width: int) -> list[int]:
        """An encoder's input begins at its first position; a decoder's prompts all end at the same one."""
        pad = [0] * (width - len(values))
        return [*values, *pad] if encodes else [*pad, *values]

    versions = (
        f"transformers {transformers.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )
    return play, {
        "versions": versions,
        "flags": {**settings, **more, "dtype": flags["dtype"], "threads": torch.get_num_threads()},
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


if __name__ == "__main__":
    serve(start)
