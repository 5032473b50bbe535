"""The batches of `bench.adapters` in vLLM: the same model, adapters and prompts, in its own environment.

    .venv/bin/python -m bench.adapters --keep DIRECTORY
    VLLM_ENVIRONMENT/bin/python -m bench.peers.vllm_adapters DIRECTORY

The first measures this engine and keeps the model and the adapters in DIRECTORY, the second prints vLLM's
output tokens per second of the same batches, in turn, as a line of JSON. Other flags must be the same.
"""

# pyright: reportMissingImports=false
import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import vllm
from vllm.lora.request import LoRARequest

N_INPUT = 32  # as in bench.adapters, which this environment cannot import


def main() -> None:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser(description="vLLM with the adapters of bench.adapters")
    parser.add_argument("directory", type=Path)
    for name, default in (("adapters", 8), ("rank", 16), ("rows", 32), ("tokens", 64), ("runs", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    flags = parser.parse_args()
    model = flags.directory / "model"
    engine = vllm.LLM(
        str(model),
        dtype=flags.dtype,
        skip_tokenizer_init=True,
        enable_lora=True,
        max_loras=flags.adapters,
        max_lora_rank=flags.rank,
        max_num_seqs=flags.rows,
        max_model_len=N_INPUT + flags.tokens + 32,
        enable_prefix_caching=False,
    )
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    adapters = [
        LoRARequest(f"adapter-{i}", i + 1, str(flags.directory / f"adapter-{i}"))
        for i in range(flags.adapters)
    ]
    over_all = [adapters[i % len(adapters)] for i in range(flags.rows)]
    batches: dict[str, list[LoRARequest | None]] = {
        "the model": [None] * flags.rows,
        "one adapter": [adapters[0]] * flags.rows,
        "all adapters": [*over_all],
        "half without": [one if i % 2 else None for i, one in enumerate(over_all)],
    }
    params = vllm.SamplingParams(max_tokens=flags.tokens, temperature=0.0, ignore_eos=True, detokenize=False)

    def rate(batch: Sequence[LoRARequest | None], run: int) -> float:
        rows = np.random.default_rng(run).integers(3, vocab_size, (len(batch), N_INPUT)).tolist()
        began = time.perf_counter()
        prompts = [{"prompt_token_ids": row} for row in rows]
        results = engine.generate(prompts, params, lora_request=list(batch), use_tqdm=False)
        seconds = time.perf_counter() - began
        return sum(len(result.outputs[0].token_ids) for result in results) / seconds

    for i, batch in enumerate(batches.values()):
        rate(batch, 1000 + i)
    rates = {name: list[float]() for name in batches}
    for run in range(flags.runs):
        for name, batch in batches.items():
            rates[name].append(rate(batch, run))
    median = {name: statistics.median(each) for name, each in rates.items()}
    print(json.dumps({"vllm": vllm.__version__, "rates": rates, "median": median}))


if __name__ == "__main__":
    main()
