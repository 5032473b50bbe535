"""Measures the share of conversations' prompt tokens that comes from the cache, on one engine and on several.

    python -m bench.ray.conversations [--engines 3] [--conversations 12] [--turns 8] [--doors 2]

Real HTTP with OpenAI's client, the demo model, greedy, several conversations at once; each case starts with
empty caches. One engine is the upper bound, because every turn finds the previous one there. Half of the
conversations begin with the same instruction, the others with different words.
"""

import argparse
import json
import platform
import random
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from time import perf_counter
from typing import Any

import httpx2
import openai
import ray
from openai.types.chat import ChatCompletionMessageParam
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from rich.console import Console
from rich.table import Table

from server.ray.app import build_app

_ENGINE: dict[str, Any] = {
    "max_batch_size": 16,
    "n_slots": 16384,  # so that nothing is evicted, not even on one engine
    "max_batch_tokens": 256,
    "compile_ahead": False,
    "access_log": "off",
}
_SECONDS = 120.0
_COMMON = "In the days of old the king spoke to the people of the city and they heard his word."
_WORDS = (
    *("king", "house", "water", "earth", "heaven", "people", "city", "son", "daughter", "day", "night"),
    *("voice", "hand", "mountain", "river", "field", "bread", "fire", "stone", "gate", "tree", "servant"),
    *("prophet", "priest", "temple", "sea", "wind", "light", "seed"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """An application: its number of engines and doors, and the router."""

    name: str
    num_replicas: int
    router: str
    doors: int = 1


@dataclass(frozen=True, slots=True)
class Result:
    """A case's share of prompt tokens found in a cache, in all turns and in the turns after the first.

    `busiest` is the share of the prompt tokens that went to the engine with most of them.
    """

    name: str
    cached: float
    later: float
    busiest: float
    seconds: float


def main() -> None:
    """Measure, print a table, and JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--doors", type=int, default=2, help="doors of the last case")
    args = parser.parse_args()
    cases = [
        Case("one engine", 1, "prefix"),
        Case(f"{args.engines} engines, router=prefix", args.engines, "prefix"),
        Case(f"{args.engines} engines, router=ray", args.engines, "ray"),
        Case(
            f"{args.engines} engines, router=prefix, {args.doors} doors", args.engines, "prefix", args.doors
        ),
    ]
    console = Console(stderr=True)
    results = list[Result]()
    with _cluster() as url:
        for case in cases:
            serve.run(build_app(_application(case)), name="orca")
            results.append(_measure(case, url, args.conversations, args.turns, args.at_once))
            console.print(results[-1])
            serve.delete("orca")
    table = Table(title=f"{args.conversations} conversations of {args.turns} turns, {args.at_once} at once")
    for column in ("case", "cached", "cached after the first turn", "busiest engine", "seconds"):
        table.add_column(column)
    for result in results:
        shares = (f"{share:.1%}" for share in (result.cached, result.later, result.busiest))
        table.add_row(result.name, *shares, f"{result.seconds:.1f}")
    Console().print(table)
    versions = {name: version(name) for name in ("ray", "jax", "openai")}
    report = {"bench": "conversations", "python": platform.python_version(), "versions": versions}
    print(json.dumps(report | {"results": [_plain(result) for result in results]}))


def _plain(result: Result) -> dict[str, Any]:
    return {name: getattr(result, name) for name in Result.__slots__}


@contextmanager
def _cluster() -> Iterator[str]:
    """Start a private Ray; yield the URL of its proxy."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        object_store_memory=100_000_000,
        log_to_driver=False,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def _application(case: Case) -> dict[str, Any]:
    return _ENGINE | {"num_replicas": case.num_replicas, "router": case.router, "doors": case.doors}


def _measure(case: Case, url: str, n_conversations: int, n_turns: int, at_once: int) -> Result:
    began = perf_counter()
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_SECONDS) as client,
        ThreadPoolExecutor(at_once) as threads,
    ):
        conversations = list(
            threads.map(lambda number: _converse(client, number, n_turns), range(n_conversations))
        )
    seconds = perf_counter() - began
    turns = [turn for conversation in conversations for turn in conversation]
    later = [turn for conversation in conversations for turn in conversation[1:]]
    by_engine = _prompt_tokens(url)
    return Result(case.name, _share(turns), _share(later), max(by_engine) / sum(by_engine), seconds)


def _share(turns: list[tuple[int, int]]) -> float:
    return sum(cached for _, cached in turns) / sum(prompt for prompt, _ in turns)


def _converse(client: openai.OpenAI, number: int, n_turns: int) -> list[tuple[int, int]]:
    """Hold a conversation; return each turn's prompt tokens, and how many of them were cached."""
    words = random.Random(number)
    texts = (" ".join(words.choices(_WORDS, k=20)) for _ in range(n_turns))
    return cached_by_turn(client, texts, system=_COMMON if number % 2 else None)


def cached_by_turn(
    client: openai.OpenAI, texts: Iterable[str], *, system: str | None = None
) -> list[tuple[int, int]]:
    """Send these texts in turn as one conversation; return each turn's prompt tokens, and the cached ones."""
    messages = list[ChatCompletionMessageParam]()
    if system is not None:
        messages.append({"role": "system", "content": system})
    turns = list[tuple[int, int]]()
    for text in texts:
        messages.append({"role": "user", "content": text})
        reply = client.chat.completions.create(
            model="demo", messages=messages, max_tokens=16, temperature=0, extra_body={"ignore_eos": True}
        )
        messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
        usage = reply.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        turns.append((usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0))
    return turns


def _prompt_tokens(url: str) -> list[float]:
    """Prompt tokens that each engine has looked up in its cache."""
    page = httpx2.get(f"{url}/metrics", timeout=_SECONDS).raise_for_status().text
    return [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "orca_prefix_cache_queries_total"
    ]


if __name__ == "__main__":
    main()
