"""The prompts of `bench.speculation` in vLLM, without drafts and with those of its n-grams.

    .venv/bin/python -m bench.speculation MODEL --keep FILE
    VLLM_ENVIRONMENT/bin/python -m bench.peers.vllm_speculation MODEL FILE

The first measures this engine and keeps the prompts and outputs in FILE, the second prints vLLM's output
tokens per second as lines of JSON, each with the fraction of outputs that equal those in FILE. Other flags
must be the same. vLLM looks for three tokens, as `ngram` does. Each engine has a process of its own, with
the variables and preloaded libraries of `bench.compare`. vLLM needs the model as safetensors, with the name
of its architecture in config.json.
"""

# pyright: reportMissingImports=false
import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from itertools import cycle, islice
from pathlib import Path

import vllm

from bench.peers.preload import vllm_variables

_SECONDS = 1800.0  # for one engine's start and all its runs


def measure(name: str, flags: argparse.Namespace) -> None:
    """Measure one engine, and print a line of JSON for each number of streams."""
    kept = json.loads(flags.file.read_text())
    prompts, outputs = kept["prompts"], kept["outputs"]
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": flags.tokens,
        "prompt_lookup_min": 3,
        "prompt_lookup_max": 3,
    }
    engine = vllm.LLM(
        str(flags.model),
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_seqs=max(flags.streams),
        max_model_len=1024,
        enable_prefix_caching=False,
        speculative_config=None if name == "off" else drafts,
    )
    params = vllm.SamplingParams(
        max_tokens=flags.output, temperature=0.0, detokenize=False, stop_token_ids=[flags.end]
    )
    for streams in flags.streams:
        asked = list(islice(cycle(range(len(prompts))), max(len(prompts), streams)))
        rates, n_equal = list[float](), 0
        for run in range(flags.runs + 1):
            n_tokens, n_equal, began = 0, 0, time.perf_counter()
            for first in range(0, len(asked), streams):
                some = asked[first : first + streams]
                given = [{"prompt_token_ids": prompts[i]} for i in some]
                for i, result in zip(some, engine.generate(given, params, use_tqdm=False), strict=True):
                    token_ids = list(result.outputs[0].token_ids)
                    n_tokens += len(token_ids)
                    n_equal += token_ids == outputs[i]
            if run:  # the first compiles
                rates.append(n_tokens / (time.perf_counter() - began))
        case = {
            "engine": f"vllm {vllm.__version__}",
            "streams": streams,
            "drafter": name,
            "tokens_per_second": round(statistics.median(rates), 1),
            "runs": [round(rate, 1) for rate in rates],
            "equal_outputs": round(n_equal / len(asked), 2),
        }
        print(json.dumps(case), flush=True)
    # vLLM's own end may wait for its processes without limit; they exit by themselves when this one is gone.
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(0)


def main() -> None:
    """Measure without drafts and with them."""
    parser = argparse.ArgumentParser(description="vLLM's n-grams on the prompts of bench.speculation")
    parser.add_argument("model", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--drafters", nargs="+", default=["off", "ngram"], choices=["off", "ngram"])
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--output", type=int, default=80)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--end", type=int, default=2, help="the token that ends an output")
    flags = parser.parse_args()
    # For the engines' processes, which alone compute.
    os.environ.update(vllm_variables(sys.executable, len(os.sched_getaffinity(0))))
    for name in flags.drafters:
        child = multiprocessing.get_context("spawn").Process(target=measure, args=(name, flags))
        child.start()
        child.join(_SECONDS)
        if child.exitcode != 0:
            child.kill()
            raise SystemExit(f"{name}: no end within {_SECONDS:g} s, or exit status {child.exitcode}")


if __name__ == "__main__":
    main()
