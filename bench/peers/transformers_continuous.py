"""Hugging Face's transformers with its continuous batching, in its own environment.

Its manager runs a thread that takes requests at any time. On a CPU its attention is "sdpa" or "eager".
"""

# pyright: reportMissingImports=false
import platform
from contextlib import ExitStack
from typing import Any

import torch
import transformers

from bench.peers.child import Play, Playing, serve

_LOOK_SECONDS = 1.0  # how often a wait checks that the manager's thread is alive


def start(flags: dict[str, Any], closing: ExitStack) -> tuple[Play, dict[str, Any]]:
    """`flags`: checkpoint, dtype, max_batch_size, cores; `arguments` may have attention, and settings of
    ContinuousBatchingConfig.
    """
    torch.set_num_threads(flags["cores"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = dict(flags.get("arguments", {}))
    attention = settings.pop("attention", "sdpa")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        flags["checkpoint"], dtype=getattr(torch, flags["dtype"]), attn_implementation=attention
    )
    model = model.to(device).eval()
    defaults: dict[str, Any] = {
        "max_requests_per_batch": flags["max_batch_size"],
        "allow_block_sharing": False,  # the same trace is played again and again
    }
    if device == "cpu":  # the defaults are a cache of 90 % of all memory, and 8192 tokens per iteration
        page = settings.get("page_size", 256)
        defaults["num_blocks"] = flags["max_batch_size"] * -(-model.config.max_position_embeddings // page)
        defaults["max_batch_tokens"] = 512
    config = transformers.ContinuousBatchingConfig(**{**defaults, **settings})
    manager = model.init_continuous_batching(
        generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=config,
    )
    manager.warmup()
    manager.start()
    closing.callback(manager.stop, block=True, timeout=20, hard_stop=True)  # its thread outlives the program

    def play(playing: Playing) -> None:
        while not playing.is_done:
            for i in playing.arrived():
                request = playing.requests[i]
                manager.add_request(
                    list(request.prompt),
                    request_id=str(i),
                    max_new_tokens=request.n_output,
                    eos_token_id=-1,  # none
                )
            wait = playing.until_next()
            result = manager.get_result(timeout=min(_LOOK_SECONDS, _LOOK_SECONDS if wait is None else wait))
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the thread of its continuous batching has ended")
            elif result.error is not None:
                raise RuntimeError(result.error)
            elif result.is_finished():
                playing.done(int(result.request_id), result.generated_tokens)

    versions = (
        f"transformers {transformers.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )
    effective = {name: getattr(manager.continuous_batching_config, name) for name in _RECORDED}
    return play, {
        "versions": versions,
        "flags": {
            "attention": model.config._attn_implementation,
            **effective,
            "dtype": flags["dtype"],
            "threads": torch.get_num_threads(),
        },
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


_RECORDED = (
    *("page_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch", "allow_block_sharing"),
    *("use_async_batching", "use_cuda_graph", "scheduler_type"),
)

if __name__ == "__main__":
    serve(start)
