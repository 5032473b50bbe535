"""Plays traces on engines in alternation, round by round, and compares the results."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Protocol

from rich.progress import Progress
from rich.table import Table

from bench.peers.played import Agreement, Played, agreement, ratio
from server.load.trace import Trace, input_lengths

OURS = "orca_jax"  # the engine that all others are compared with


class Engine(Protocol):
    """An engine that plays traces."""

    name: str
    about: dict[str, Any]

    def play(self, trace: Trace) -> Played:
        """Play a trace once."""
        ...

    def warm_up(self, trace: Trace) -> Played:
        """Play a trace once, with its tokens if available."""
        ...


@dataclass(slots=True)
class Rounds:
    """Each engine's results for one trace: a warm-up with all requests at once, then each round."""

    trace: Trace
    warm: dict[str, Played] = field(default_factory=dict[str, Played])
    played: dict[str, list[Played]] = field(default_factory=dict[str, list[Played]])

    def tokens_per_second(self, name: str) -> list[float]:
        """For each round."""
        return [one.tokens_per_second for one in self.played[name]]

    def latency_ms(self, name: str) -> dict[str, list[float]]:
        """Percentiles of normalized latency for each round."""
        return _by_percentile([one.normalized_latency_ms() for one in self.played[name]])

    def first_token_ms(self, name: str) -> dict[str, list[float]]:
        """Percentiles of the time to the first token for each round; empty if not recorded."""
        each = [one.first_token_ms() for one in self.played[name]]
        return _by_percentile([one for one in each if one is not None])

    def agreement(self, name: str) -> Agreement | None:
        """The agreement of an engine's tokens with ours when all requests arrive at once."""
        return agreement(self.warm[OURS], self.warm[name])

    def missing(self, name: str) -> int:
        """The number of missing output tokens in the worst round."""
        return max(one.missing(self.trace) for one in self.played[name])


def _by_percentile(each: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    return {q: [one[q] for one in each] for q in (each[0] if each else ())}


def play_in_turn(
    engines: Sequence[Engine],
    traces: Mapping[str, Trace],
    rounds: int,
    progress: Progress,
    *,
    rest: float = 0.0,
) -> dict[str, Rounds]:
    """Play each trace on each engine once to warm up, then `rounds` times; returns Rounds by trace name.

    Each round begins with another engine. Before each play all engines rest for `rest` seconds, because
    threads of the previous engine may still be polling.
    """
    found = {
        name: Rounds(trace, played={engine.name: [] for engine in engines}) for name, trace in traces.items()
    }
    task = progress.add_task("warming up", total=(rounds + 1) * len(engines) * len(traces))
    for one in found.values():
        at_once = tuple(replace(request, arrival=0.0) for request in one.trace)
        for engine in engines:
            one.warm[engine.name] = engine.warm_up(at_once)
            progress.advance(task)
    for i in range(rounds):
        begin = i % len(engines)
        for name, one in found.items():
            for engine in [*engines[begin:], *engines[:begin]]:
                progress.update(task, description=f"round {i + 1} of {rounds}: {name}, {engine.name}")
                time.sleep(rest)
                played = engine.play(one.trace)
                one.played[engine.name].append(played)
                print(
                    f"round {i + 1}, {name}: {engine.name} {played.tokens_per_second:.1f} tokens/s",
                    flush=True,
                )
                progress.advance(task)
    return found


def table(found: Mapping[str, Rounds]) -> Table:
    """Medians over the rounds, for tokens per second also least and most. Ratios, ours over theirs, are
    medians of the rounds' ratios.
    """
    made = Table(
        title="medians of the rounds (least to most); latency is normalized, ms per token; first token in ms"
    )
    made.add_column("trace", no_wrap=True)
    made.add_column("engine", no_wrap=True)
    for heading in (
        "tokens/s",
        "ours over theirs",
        "latency p50",
        "p99",
        "p50, p99 ratio",
        "first token p50",
        "p99",
        "p50, p99 ratio",
        "same tokens",
    ):
        made.add_column(heading, justify="right")
    for trace, one in found.items():
        made.add_section()
        for name in one.played:
            rates, same = one.tokens_per_second(name), one.agreement(name)
            missing = one.missing(name)
            is_ours = name == OURS
            made.add_row(
                trace,
                name,
                f"{spread(rates)}{' !' if missing else ''}",
                "" if is_ours else f"{ratio(one.tokens_per_second(OURS), rates):.2f}",
                *_times(one.latency_ms(OURS), one.latency_ms(name), is_ours),
                *_times(one.first_token_ms(OURS), one.first_token_ms(name), is_ours),
                "" if is_ours else "unknown" if same is None else str(same),
            )
    return made


def _times(
    ours: dict[str, list[float]], theirs: dict[str, list[float]], is_ours: bool
) -> tuple[str, str, str]:
    """Median p50 and p99, and ratios of ours to theirs."""
    if not theirs:
        return "", "", ""
    ratios = [f"{ratio(ours[q], theirs[q]):.2f}" for q in ("p50", "p99")] if ours and not is_ours else []
    return f"{median(theirs['p50']):.1f}", f"{median(theirs['p99']):.1f}", ", ".join(ratios)


def warnings(found: Mapping[str, Rounds]) -> list[str]:
    """A line for each engine that returned fewer tokens than requested."""
    return [
        f"! {name}, {trace}: {missing} of {sum(r.n_output for r in one.trace)} tokens are missing; its"
        " figures count the rest, which is less work than the others did"
        for trace, one in found.items()
        for name in one.played
        if (missing := one.missing(name))
    ]


def spread(values: Sequence[float]) -> str:
    """Median, least and most."""
    both = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
    return f"{median(values):.1f}{both}"


def summary(found: Mapping[str, Rounds]) -> dict[str, dict[str, Any]]:
    """Figures of each round and ratios, by trace and engine."""
    return {trace: {name: _summary_of(one, name) for name in one.played} for trace, one in found.items()}


def _summary_of(one: Rounds, name: str) -> dict[str, Any]:
    rates, latency, first = one.tokens_per_second(name), one.latency_ms(name), one.first_token_ms(name)
    summary: dict[str, Any] = {
        "tokens_per_second": [round(rate, 2) for rate in rates],
        "requests_per_second": [round(played.requests_per_second, 4) for played in one.played[name]],
        "normalized_latency_ms": {q: [round(ms, 2) for ms in each] for q, each in latency.items()},
        "first_token_ms": {q: [round(ms, 2) for ms in each] for q, each in first.items()},
        "missing_tokens": one.missing(name),
    }
    if name != OURS:
        same = one.agreement(name)
        summary["ours_over_theirs"] = {
            "tokens_per_second": round(ratio(one.tokens_per_second(OURS), rates), 3),
            "normalized_latency": _ratios(one.latency_ms(OURS), latency),
            "first_token": _ratios(one.first_token_ms(OURS), first),
        }
        summary["same_tokens_as_ours"] = None if same is None else asdict(same)
    return summary


def _ratios(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> dict[str, float]:
    return {q: round(ratio(ours[q], theirs[q]), 3) for q in theirs if q in ours}


def raw(found: Mapping[str, Rounds]) -> list[dict[str, Any]]:
    """A record for each measured play, with all its requests."""
    return [
        {
            "trace": trace,
            "engine": name,
            "round": i + 1,
            "seconds": played.seconds,
            "requests": [
                {
                    "arrival": request.arrival,
                    "after": request.after,
                    "n_input": n_input,
                    "n_output": request.n_output,
                    "n_tokens": n_tokens,
                    "latency": latency,
                    "first_token": None if played.first_token is None else played.first_token[j],
                }
                for j, (request, n_input, n_tokens, latency) in enumerate(
                    zip(one.trace, input_lengths(one.trace), played.n_tokens, played.latency, strict=True)
                )
            ],
        }
        for trace, one in found.items()
        for name, each in one.played.items()
        for i, played in enumerate(each)
    ]
