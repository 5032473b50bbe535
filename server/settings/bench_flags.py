"""The flags of `orca bench`."""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from server.settings.flags import argparse_type

ROUTES = ("completions", "chat")
# Latencies that --slo may limit, with the names of `vllm bench serve --goodput`.
OBJECTIVES = ("ttft", "tpot", "e2el")
_MOST_TOKENS = 1 << 24

T = TypeVar("T")


def add_bench_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags. The values are checked here as far as each flag by itself can be."""
    server = command.add_argument_group("server")
    server.add_argument(
        "--url", default="http://127.0.0.1:8000", help="its address (default: http://127.0.0.1:8000)"
    )
    server.add_argument("--model", metavar="NAME", help="the model's name there (default: its first model)")
    server.add_argument("--route", choices=ROUTES, default="completions", help="(default: completions)")
    server.add_argument(
        "--extra",
        metavar="JSON",
        type=argparse_type(_object),
        default={},
        help="more fields of requests",
    )
    server.add_argument(
        "--timeout", type=argparse_type(_seconds), default=600.0, help="seconds for a request (default: 600)"
    )
    load = command.add_argument_group("load")
    loads = load.add_mutually_exclusive_group()
    loads.add_argument(
        "--concurrency",
        metavar="N,N,...",
        type=argparse_type(_list_of(_count)),
        help="closed loop: requests that run at once, one load after another (default: 8)",
    )
    loads.add_argument(
        "--rate",
        metavar="R,R,...",
        type=argparse_type(_list_of(_positive)),
        help="open loop: requests a second, one load after another",
    )
    load.add_argument(
        "--burstiness",
        metavar="X",
        type=argparse_type(_positive),
        default=1.0,
        help="of --rate: 1 is a Poisson process, less comes in bursts, inf is regular (default: 1)",
    )
    load.add_argument(
        "--max-concurrency",
        metavar="N",
        type=argparse_type(_count),
        help="with --rate or --trace: at most so many run at once; later ones wait (default: no limit)",
    )
    load.add_argument(
        "--warm-up",
        metavar="N",
        type=argparse_type(_count_or_none),
        default=4,
        help="requests before the first load, which are not counted (default: 4)",
    )
    requests = command.add_argument_group("requests")
    requests.add_argument(
        "--requests",
        metavar="N",
        type=argparse_type(_count),
        help="of each load (default: 100, or the file's)",
    )
    requests.add_argument(
        "--input",
        metavar="N or N,N",
        type=argparse_type(_bounds),
        default=(256, 256),
        help="prompt tokens, or the bounds of a uniform distribution (default: 256)",
    )
    requests.add_argument(
        "--output",
        metavar="N or N,N",
        type=argparse_type(_bounds),
        default=(64, 64),
        help="output tokens, likewise (default: 64)",
    )
    requests.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="a file's requests, and without --rate or --concurrency their arrivals: lines of JSON, a "
        "recording of `orca serve --record`, or a trace of Azure, BurstGPT, Mooncake, AgentX, ServeGen "
        "(a directory) or ShareGPT's form",
    )
    requests.add_argument(
        "--speed",
        metavar="X",
        type=argparse_type(_positive),
        default=1.0,
        help="how much faster than recorded the requests of --trace arrive (default: 1)",
    )
    requests.add_argument(
        "--shrink",
        metavar="N",
        type=argparse_type(_count),
        default=1,
        help="keep one in N tokens of the requests of --trace, for a small model (default: 1)",
    )
    requests.add_argument("--seed", type=argparse_type(_count_or_none), default=0, help="(default: 0)")
    requests.add_argument(
        "--vocab-size",
        metavar="N",
        type=argparse_type(_count),
        default=1000,
        help="prompts have token ids below this (default: 1000, which every tokenizer has)",
    )
    results = command.add_argument_group("results")
    results.add_argument(
        "--slo",
        metavar="NAME:MS,...",
        type=argparse_type(_objectives),
        default={},
        help=f"count requests within these milliseconds as good; NAME is {', '.join(OBJECTIVES)}",
    )
    results.add_argument("--json", metavar="FILE", type=Path, help="write all figures")
    results.add_argument(
        "--picture",
        metavar="FILE.svg",
        type=Path,
        help="draw latency over throughput: a point for each load",
    )
    results.add_argument(
        "--processes",
        metavar="N",
        type=argparse_type(_count),
        help="processes of the client (default: one for 64 concurrent requests, at most one for each core)",
    )


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _MOST_TOKENS:
        raise ValueError(f"{text!r} is not a whole number from 1 to {_MOST_TOKENS}")
    return int(text)


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _positive(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise ValueError(f"{text} is not a number above 0")
    return number


def _seconds(text: str) -> float:
    seconds = _positive(text)
    if seconds == math.inf:
        raise ValueError("every request needs a deadline; give a number of seconds")
    return seconds


def _list_of(one: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    return lambda text: tuple(one(each) for each in text.split(","))


def _bounds(text: str) -> tuple[int, int]:
    bounds = [_count(each) for each in text.split(",")]
    if len(bounds) > 2 or bounds[0] > bounds[-1]:
        raise ValueError(f"{text!r} is neither N nor LEAST,MOST")
    return bounds[0], bounds[-1]


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text[:100]!r} is not a JSON object")
    return value


def _objectives(text: str) -> dict[str, float]:
    found = dict[str, float]()
    for each in text.split(","):
        name, colon, milliseconds = each.partition(":")
        if not colon or name not in OBJECTIVES:
            raise ValueError(f"{each!r} is not NAME:MILLISECONDS with a NAME of {', '.join(OBJECTIVES)}")
        found[name] = _positive(milliseconds)
    return found
