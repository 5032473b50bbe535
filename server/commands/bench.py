"""`orca bench`: measures a running server under load, from the outside."""

import argparse
import json
import os
import platform
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import Progress

from server.commands.notes import Notes
from server.errors import UsageError
from server.load.client import Target
from server.load.figures import Figures, figures
from server.load.player import Players, n_processes
from server.load.report import details, picture, table
from server.load.trace import Trace
from server.load.workload import Load, Requests
from server.process.addresses import server_url

_ASK_SECONDS = 10.0
_MOST_STREAMS = 256  # that an open loop is expected to have at once
_MOST_ERRORS = 5  # that are shown
_WIDTH = 120


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 1 if a request failed."""
    notes = Notes()
    headers = _headers(os.environ)
    url = server_url(args.url, flag="--url") + "/v1"
    model = args.model or _first_model(url, headers)
    target = Target(
        url=url, model=model, route=args.route, headers=headers, extra=args.extra, timeout=args.timeout
    )
    requests = Requests(
        number=args.requests,
        n_input=args.input,
        n_output=args.output,
        vocab_size=args.vocab_size,
        seed=args.seed,
        file=args.trace,
        speed=args.speed,
        shrink=args.shrink,
    )
    loads = _loads(args)
    traces = _traces(requests, loads, args.burstiness)
    most = max(
        min(load.concurrency or _MOST_STREAMS, len(trace)) for load, trace in zip(loads, traces, strict=True)
    )
    n = args.processes or n_processes(most)
    results = list[Figures]()
    with (
        Players(n) as players,
        Progress(
            console=Console(stderr=True), transient=True, disable=not notes.console.is_terminal
        ) as progress,
    ):
        if args.warm_up:
            # Prompts of its own, so that the first load finds none of them in a cache.
            warm = replace(requests, number=args.warm_up).trace(Load(concurrency=args.warm_up), len(loads))
            first_turns = tuple(request for request in warm if request.after is None)
            players.play(first_turns, target, concurrency=args.warm_up)
        for load, trace in zip(loads, traces, strict=True):
            task = progress.add_task(load.label, total=len(trace))
            played = players.play(
                trace,
                target,
                concurrency=load.concurrency,
                on_progress=lambda ended, task=task: progress.update(task, completed=ended),
            )
            results.append(figures(played, args.slo))
    labels = [load.label for load in loads]
    _show(f"{model} at {args.url}", labels, results, notes)
    if args.json is not None:
        record = {
            "benchmark": "orca bench",
            "url": args.url,
            "model": model,
            "route": args.route,
            "seed": args.seed,
            "trace": None if args.trace is None else args.trace.name,
            "objectives_ms": args.slo,
            "client": {"processes": n, "cores": os.cpu_count(), "python": platform.python_version()},
            "loads": [{"load": label} | each.record() for label, each in zip(labels, results, strict=True)],
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if args.picture is not None:
        args.picture.write_text(picture(f"{model}", labels, results), encoding="utf-8")
    return 1 if any(each.n_failed for each in results) else 0


def _loads(args: argparse.Namespace) -> list[Load]:
    if args.rate is not None:
        return [Load(rate, args.max_concurrency) for rate in args.rate]
    if args.concurrency is None and args.trace is not None:
        return [Load(None, args.max_concurrency)]
    if args.max_concurrency is not None:
        raise UsageError(
            "--max-concurrency limits --rate or the arrivals of --trace; a closed loop has --concurrency"
        )
    return [Load(None, concurrency) for concurrency in args.concurrency or (8,)]


def _traces(requests: Requests, loads: Sequence[Load], burstiness: float) -> list[Trace]:
    try:
        return [requests.trace(load, i, burstiness) for i, load in enumerate(loads)]
    except OSError as error:
        raise UsageError(f"{requests.file} cannot be read: {error.strerror}") from error


def _headers(environment: Mapping[str, str]) -> dict[str, str]:
    key = environment.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _first_model(url: str, headers: Mapping[str, str]) -> str:
    """The name of the server's first model. Raises UsageError if no such server answers."""
    request = urllib.request.Request(f"{url}/models", headers=dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=_ASK_SECONDS) as response:
            answer: Any = json.load(response)
        return str(answer["data"][0]["id"])
    except urllib.error.HTTPError as error:
        key = "; the variable OPENAI_API_KEY has the key" if error.code == 401 else ""
        raise UsageError(f"{url}/models answered {error.code} {error.reason}{key}") from error
    except OSError as error:
        raise UsageError(f"no server answers at {url}: {error}; start one, or give its --url") from error
    except (ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"{url}/models is not a list of models as OpenAI's API has it; give --model"
        ) from error


def _show(title: str, labels: Sequence[str], results: Sequence[Figures], notes: Notes) -> None:
    console = Console(width=_WIDTH)
    console.print(table(title, labels, results))
    if len(results) == 1:
        console.print(details(results[0]))
    for label, each in zip(labels, results, strict=True):
        cached = f", {each.n_cached:,} of them cached" if each.n_cached else ""
        notes(
            f"{label}: {each.n_input:,} prompt tokens{cached}; {each.n_output:,} output tokens in "
            f"{each.seconds:.1f} s; the client used {each.client_us_per_token:.0f} us a token"
        )
        if each.client_limit is not None:
            notes(f"{label}: the client was the limit: {each.client_limit}")
        for message, count in sorted(each.errors.items(), key=lambda pair: -pair[1])[:_MOST_ERRORS]:
            notes(f"{label}: {count} requests failed: {message}")
