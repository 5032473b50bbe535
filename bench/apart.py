"""Prefill and decode apart, beside one engine on the same cores: gaps between tokens, and the first token.

    python -m bench.apart [--model M] [--streams 4] [--prompt 2000] [--prompts 8] [--pause 0.5] [--alone]

Three server processes: one with both roles on cores 0 and 1, and one of each role, on core 0 and on core 1.
Only one case has load at a time. In each case some streams decode while long prompts arrive one at a time,
each `pause` seconds after the last one's answer. Reported are the gaps between tokens of the streams. Then
prompts of 500 tokens, and of as many as the long ones, come alone: the time to the first token of both steps,
over that of the first server alone, and the gap to the second token, which waits for the transfer. The same
once more through `orca route`, and with log-probabilities, with which the first token waits for the transfer
too. The last line is JSON. With `--alone` there are no streams.
"""

import argparse
import json
import os
import random
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from bench.host_tier import CONFIG
from bench.server.server_process import OrcaProcess, ServerProcess

_SECONDS = 120.0
_ROUTES = re.compile(r"^(http://\S+) routes to", re.MULTILINE)
_FIRST = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1, "stream": False}
_FEW = 500  # tokens of the prompts that come alone
_RUNS = 7


class Load:
    """Streams that decode, and prompts beside them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._rng = random.Random(0)

    def prompt(self, n: int) -> list[int]:
        return [self._rng.randrange(CONFIG["vocab_size"]) for _ in range(n)]

    def complete(self, urls: Sequence[str], prompt: list[int], n_output: int, **more: Any) -> list[float]:
        """The times of a stream's tokens. With two servers, the first computes the prompt."""
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": n_output, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, **more}
        if len(urls) == 2:
            body |= {"kv_transfer_params": self.first(urls[0], prompt)}
        times: list[float] = []
        with requests.post(f"{urls[-1]}/v1/completions", json=body, stream=True, timeout=_SECONDS) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines(chunk_size=1):
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())
        return times

    def first(self, url: str, prompt: list[int]) -> dict[str, Any]:
        """The first step alone."""
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **_FIRST}
        answer = requests.post(f"{url}/v1/completions", json=body, timeout=_SECONDS)
        answer.raise_for_status()
        return answer.json()["kv_transfer_params"]

    def gaps(self, urls: Sequence[str]) -> list[float]:
        """The gaps between tokens of streams, in seconds, while prompts are computed."""
        args, done, gaps = self._args, threading.Event(), list[float]()

        def decode() -> None:
            prompt = self.prompt(16)
            while not done.is_set():
                times = self.complete(urls[-1:], prompt, 200)
                gaps.extend(b - a for a, b in pairwise(times) if not done.is_set())

        threads = [threading.Thread(target=decode) for _ in range(args.streams)]
        for thread in threads:
            thread.start()
        for _ in range(args.prompts):
            self.complete(urls, self.prompt(args.prompt), 2)
            time.sleep(args.pause)
        done.set()
        for thread in threads:
            thread.join()
        return gaps


@contextmanager
def route(prefill: str, decode: str) -> Iterator[str]:
    """Run `orca route` before two servers; its address."""
    words = ["route", "--prefill", prefill, "--decode", decode, "--host", "127.0.0.1", "--port", "0"]
    with OrcaProcess(words) as process, requests.Session() as session:
        url = process.wait_for(_ROUTES, _SECONDS)[1]
        # The address is said before it listens.
        retries = Retry(connect=10, backoff_factor=0.05, backoff_max=5)
        session.mount("http://", HTTPAdapter(max_retries=retries))
        session.get(f"{url}/health", timeout=_SECONDS).raise_for_status()
        yield url


def alone(load: Load, servers: Sequence[str], n_tokens: int) -> dict[str, float]:
    """Medians in ms of prompts of so many tokens that come alone, each case in turn."""
    found: dict[str, list[float]] = {}

    def note(case: str, began: float, times: Sequence[float]) -> None:
        found.setdefault(case, []).append(times[0] - began)
        if len(times) > 1:
            found.setdefault(f"second_{case}", []).append(times[1] - times[0])

    with route(*servers) as routed:
        for run in range(_RUNS + 1):
            if run == 1:
                found.clear()  # the first one warms up
            for case, urls, more in (
                ("one_server", servers[:1], {}),
                ("two_servers", servers, {}),
                ("routed", [routed], {}),
                ("with_logprobs", servers, {"logprobs": 1}),
            ):
                began = time.perf_counter()
                note(case, began, load.complete(urls, load.prompt(n_tokens), 2, **more))
    return {case: round(1e3 * statistics.median(each), 1) for case, each in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="prefill and decode apart")
    parser.add_argument("--model", help="a directory, with random weights (default: bench.host_tier's)")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the prompts beside the streams")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two of them")
    parser.add_argument("--alone", action="store_true", help="only the prompts that come alone")
    args = parser.parse_args(argv)
    load = Load(args)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model = args.model or directory
        if args.model is None:
            Path(directory, "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        flags = [model, "--load-format", "dummy", "--max-batch-size", "8", "--n-slots", "16384"]
        flags += ["--max-batch-tokens", "512"]
        apart = [*flags, "--kv-host-bytes", str(1 << 30), "--role"]

        def start(flags: Sequence[str], cores: set[int]) -> str:
            server = stack.enter_context(ServerProcess(flags, compile_ahead=True))
            os.sched_setaffinity(server.pid, cores)  # before it has other threads
            return server.wait_until_ready(240).url

        cases: dict[str, dict[str, float]] = {}
        together = [] if args.alone else [start(flags, {0, 1})]
        separate = [start([*apart, "prefill"], {0}), start([*apart, "decode"], {1})]
        for name, urls in () if args.alone else (("together", together), ("apart", separate)):
            load.complete(urls, load.prompt(args.prompt), 2)
            gaps = sorted(1e3 * gap for gap in load.gaps(urls))
            cases[name] = {
                "n": len(gaps),
                "median_ms": round(statistics.median(gaps), 1),
                "p99_ms": round(gaps[int(0.99 * len(gaps))], 1),
                "most_ms": round(gaps[-1], 1),
            }
            print(name, cases[name], flush=True)
        times = {n: alone(load, separate, n) for n in (_FEW, args.prompt)}
    figures: dict[str, Any] = {"benchmark": "apart", **cases}
    if cases:
        figures["p99_ratio"] = round(cases["apart"]["p99_ms"] / cases["together"]["p99_ms"], 3)
    for n, each in times.items():
        figures[f"{n}_tokens_ms"] = each
        figures[f"{n}_tokens_transfer_adds"] = {
            case: round(each[case] / each["one_server"] - 1, 3)
            for case in ("two_servers", "routed", "with_logprobs")
        }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
