"""PyTorch's scaled_dot_product_attention on the kernel benchmark's batches: a line of JSON for each.

It runs in a separate process, so that two frameworks do not share the memory. Calls are captured in a CUDA
graph, each with different keys and values as far as memory allows and with the previous result as query; the
graph's replays are timed. Not to be run by hand.
"""

import argparse
import importlib
import json
import math
import time
from statistics import median
from typing import Any, get_args

from bench.kernel.shapes import Case, Scale, torch_cases

_PAST_CACHE = 160 << 20
_MOST_APART = 1 << 30
_MOST_CALLS = 64


def say(**words: Any) -> None:
    """A line for `bench.kernel`."""
    print(json.dumps(words), flush=True)


def time_case(torch: Any, case: Case, *, at_least: float = 0.02, repeat: int = 7) -> dict[str, Any]:
    """Seconds of one call: median, least, most, and the host's."""
    heads, n_rows, (length, n_keys) = case.heads, len(case.rows), case.rows[0]
    n_calls = min(_MOST_CALLS, max(4, _PAST_CACHE // case.kv_bytes))
    n_apart = max(1, min(n_calls, _MOST_APART // case.kv_bytes))
    made = {"device": "cuda", "dtype": torch.bfloat16}
    position = torch.arange(n_keys, device="cuda", dtype=torch.float32)
    # As in clock.py: a chained result keeps a query's spread.
    spread = ((position + 1) * math.exp(-0.5)).sqrt().to(torch.bfloat16)[:, None]
    sets = []
    for _ in range(n_apart):
        keys = torch.randn(n_rows, heads.n_kv_heads, n_keys, heads.head_size, **made)
        sets.append((keys, torch.randn_like(keys) * spread))
    query = torch.randn(n_rows, heads.n_heads, length, heads.head_size, **made)
    attend = torch.nn.functional.scaled_dot_product_attention
    grouped = {"enable_gqa": True} if heads.group > 1 else {}

    def calls() -> Any:
        q = query
        for i in range(n_calls):
            q = attend(q, *sets[i % n_apart], is_causal=length > 1, **grouped)
        return q

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()

    def replay(times: int) -> tuple[float, float]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            graph.replay()
        host = time.perf_counter() - start
        torch.cuda.synchronize()
        return time.perf_counter() - start, host

    replay(3)
    once, host = replay(1)
    n_runs = max(1, min(10_000, int(at_least / once) + 1))
    times = [replay(n_runs)[0] / (n_runs * n_calls) for _ in range(repeat)]
    return {
        "seconds": median(times),
        "least": min(times),
        "most": max(times),
        "host": host / n_calls,
        "n_calls": n_calls,
    }


def main() -> None:
    """Time every case after the first `--done`."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernel.torch_attention")
    parser.add_argument("--scale", choices=get_args(Scale), required=True)
    parser.add_argument("--done", type=int, default=0)
    parser.add_argument("--until", type=float, required=True, help="seconds since the epoch")
    flags = parser.parse_args()
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        say(unfit="PyTorch is not installed here")
        return
    if not torch.cuda.is_available():
        say(unfit=f"torch {torch.__version__} sees no GPU")
        return
    say(torch=torch.__version__)
    for index, case in list(enumerate(torch_cases(flags.scale)))[flags.done :]:
        if time.time() >= flags.until:
            say(index=index, failed="left out: the time is up")
            continue
        say(starting=index)
        try:
            say(index=index, values=time_case(torch, case))
        except Exception as error:
            say(index=index, failed=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            torch.cuda.synchronize()  # raises where the device is lost
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
