"""Kills or stops workers at random moments under load, and measures losses and the time to recover.

    python -m bench.server.worker_faults [MODEL] [--kills 20] [--signal KILL] [--seed 0] [--stages 2]

Starts `orca serve --worker-processes` with the demo model unless MODEL is given, keeps 24 streams running, a
third of which sample with a seed, and sends a worker the signal while at least 16 of them are between their
first token and their last. Every stream must have its full length, and the text that one process gives, as
far as choices are sure. Exits with 1, naming what failed, unless all is well. Prints a table and, as the last
line, JSON.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.server.repeated_streams import KnownStream, RepeatedStreams, asked
from bench.server.server_process import ServerProcess
from bench.server.sure_choices import sure_choices
from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.model_files.found_model import DEMO_MODEL

N_STREAMS = 24
N_BETWEEN = 16  # streams that a fault must hit at least
_NOTICE_SECONDS = 60.0
_BACK_SECONDS = 120.0
_LOOK_SECONDS = 0.01
_STARTED = re.compile(r"^stage (\d+): its process \(pid (\d+)\) was started", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and its consequences. Times in seconds.

    `n_between` streams were between their first token and their last. `recovered` is the time from the signal
    to the token that ended the longest silence after it, `noticed` to the server's log that a worker is lost,
    `reported` is orca_worker_last_recovery_seconds, and `reason` what /ready reported meanwhile.
    """

    stage: int  # from 1
    n_between: int
    recovered: float
    noticed: float
    reported: float
    reason: str


@dataclass(slots=True)
class Report:
    """The result of all faults: `failures` is empty if all is well."""

    faults: list[Fault] = field(default_factory=list[Fault])
    failures: list[str] = field(default_factory=list[str])
    n_streams: int = 0  # that ended
    n_sure: int = 0  # requests of which every choice is sure


def known_streams(
    directory: Path, *, n: int = N_STREAMS, n_output: int, longest: int, seed: int = 0
) -> list[KnownStream]:
    """`n` requests of `n_output` tokens, every third with a seed, with the texts that one process here gives.

    Prompts have up to `longest` tokens.
    """
    rng = random.Random(seed)
    checkpoint = load_checkpoint(directory, dtype="float32")
    config, parameters = checkpoint.config, checkpoint.parameters
    prompts = [
        tuple(rng.randrange(1, config.vocab_size - 1) for _ in range(rng.randrange(1, longest + 1)))
        for _ in range(n)
    ]
    seeds = [rng.getrandbits(63) if i % 3 == 0 else None for i in range(n)]
    sampling = [
        SamplingParams(max_tokens=n_output, temperature=0.0 if s is None else 1.0, seed=s, ignore_eos=True)
        for s in seeds
    ]
    with LLM(directory, dtype="float32", max_batch_size=8, max_batch_tokens=config.n_positions) as llm:
        results = llm.generate(prompts, sampling)
        tokenizer = llm.tokenizer
    assert tokenizer is not None
    known = []
    for prompt, params, result in zip(prompts, sampling, results, strict=True):
        sure = sure_choices(config, parameters, prompt, result.token_ids, params)
        assert sure.wrong is None, f"{prompt} with {params}: token {sure.wrong} is not the reference's"
        text = tokenizer.decode(result.token_ids[: sure.n]).rstrip("\N{REPLACEMENT CHARACTER}")
        known.append(
            KnownStream(
                prompt=prompt,
                n_output=n_output,
                seed=params.seed,
                text=result.text,
                sure=result.text if sure.n == n_output else text,
            )
        )
    return known


def worker_pids(server: ServerProcess) -> list[int]:
    """The processes that the server started last according to its log, stage 1 first."""
    pids = {int(stage): int(pid) for stage, pid in _STARTED.findall(server.stderr())}
    return [pids[stage] for stage in sorted(pids)]


async def figures(address: tuple[str, int]) -> dict[str, float]:
    """/metrics: metrics of stages as `name/stage`, others summed over labels."""
    _, text = await asked(address, "/metrics")
    values = dict[str, float]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            stage = sample.labels.get("stage")
            name = sample.name if stage is None else f"{sample.name}/{stage}"
            values[name] = values.get(name, 0.0) + sample.value
    return values


async def make_fault(
    server: ServerProcess, streams: RepeatedStreams, number: signal.Signals, rng: random.Random
) -> Fault:
    """Send a random worker a signal at a random moment, and wait until tokens arrive again.

    Raises AssertionError if the server reports it incorrectly, and TimeoutError.
    """
    address = server.http_address
    async with asyncio.timeout(_NOTICE_SECONDS):
        for _ in range(rng.randrange(N_STREAMS, 20 * N_STREAMS)):
            await streams.arrival()
        while streams.n_between < N_BETWEEN:
            await streams.arrival()
    before, pids = await figures(address), worker_pids(server)
    stage = rng.randrange(len(pids))
    while streams.n_between < N_BETWEEN:
        await streams.arrival()
    n_between, sent_at = streams.n_between, time.monotonic()
    os.kill(pids[stage], number)
    async with asyncio.timeout(_NOTICE_SECONDS):
        status, body = await asked(address, "/ready")
        while status == 200:
            await asyncio.sleep(_LOOK_SECONDS)
            status, body = await asked(address, "/ready")
    noticed = time.monotonic() - sent_at
    ready = json.loads(body)
    assert ready["status"] == "recovering", ready
    down = await figures(address)
    if down["orca_worker_recoveries_total"] == before["orca_worker_recoveries_total"]:
        assert down["orca_worker_losses_total"] > before["orca_worker_losses_total"]
        assert min(down[f"orca_worker_up/{i + 1}"] for i in range(len(pids))) == 0
    async with asyncio.timeout(_BACK_SECONDS):
        while (await asked(address, "/ready"))[0] != 200:
            await asyncio.sleep(_LOOK_SECONDS)
        up = time.monotonic()
        await streams.arrival()
    after = await figures(address)
    assert after["orca_worker_recoveries_total"] == before["orca_worker_recoveries_total"] + 1
    assert all(after[f"orca_worker_up/{i + 1}"] == 1 for i in range(len(pids)))
    now = worker_pids(server)
    assert now[stage] != pids[stage], f"stage {stage + 1} was sent {number.name} and is still the same"
    times = [sent_at, *(moment for moment in streams.arrivals if moment > sent_at)]
    longest = max(pairwise(times), key=lambda pair: pair[1] - pair[0])
    assert up - 1.0 < longest[1], (
        f"tokens came {longest[1] - sent_at:g} s after the loss, /ready {up - sent_at:g} s"
    )
    return Fault(
        stage=stage + 1,
        n_between=n_between,
        recovered=longest[1] - sent_at,
        noticed=noticed,
        reported=after["orca_worker_last_recovery_seconds"],
        reason=ready["reason"],
    )


def make_faults(
    server: ServerProcess,
    known: Sequence[KnownStream],
    signals: Sequence[signal.Signals],
    *,
    seed: int = 0,
    on_fault: Callable[[Fault], object] = lambda fault: None,
) -> Report:
    """Make one fault for each of `signals`, one after the other, while all of `known` run."""
    report = Report(n_sure=sum(one.sure == one.text for one in known))
    asyncio.run(_make_faults(server, known, signals, random.Random(seed), report, on_fault))
    return report


async def _make_faults(
    server: ServerProcess,
    known: Sequence[KnownStream],
    signals: Sequence[signal.Signals],
    rng: random.Random,
    report: Report,
    on_fault: Callable[[Fault], object],
) -> None:
    async with RepeatedStreams(server.http_address, known, once=True) as undisturbed:
        pass
    report.failures += undisturbed.wrong
    async with RepeatedStreams(server.http_address, known) as streams:
        for number in signals:
            try:
                fault = await make_fault(server, streams, number, rng)
            except (AssertionError, TimeoutError, OSError, ValueError, LookupError) as error:
                report.failures.append(f"fault {len(report.faults) + 1}: {type(error).__name__}: {error}")
                break
            report.faults.append(fault)
            on_fault(fault)
    report.failures += streams.wrong
    report.n_streams = len(streams.ended)
    after = await figures(server.http_address)
    reached = {name: after[f"orca_{name}"] for name in ("num_requests_running", "num_requests_waiting")}
    if any(reached.values()):
        report.failures.append(f"after the last stream ended the server has {reached}")


def table(faults: Sequence[Fault]) -> Table:
    """A row per fault."""
    result = Table(
        "fault", "stage", "streams hit", "noticed, s", "token after, s", "server says, s", "reason"
    )
    for i, fault in enumerate(faults):
        numbers = (f"{number:.2f}" for number in (fault.noticed, fault.recovered, fault.reported))
        result.add_row(
            str(i + 1), str(fault.stage), str(fault.n_between), *numbers, fault.reason.split(";")[0]
        )
    return result


def main() -> None:
    """Make the faults, print a table and, as the last line, JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.server.worker_faults", description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="a directory (default: the demo model)")
    parser.add_argument("--kills", type=int, default=20, help="faults (default: 20)")
    parser.add_argument("--signal", default="KILL", choices=("KILL", "STOP"), help="(default: KILL)")
    parser.add_argument("--seed", type=int, default=0, help="seed of moments and stages (default: 0)")
    parser.add_argument("--stages", type=int, default=2, help="worker processes (default: 2)")
    parser.add_argument("--iteration-timeout", type=float, default=2.0, help="seconds (default: 2)")
    flags = parser.parse_args()
    console = Console(stderr=True)
    directory = flags.model or DEMO_MODEL
    n_positions = load_checkpoint(directory, dtype="float32").config.n_positions
    known = known_streams(directory, n_output=3 * n_positions // 4, longest=n_positions // 8)
    number = signal.Signals[f"SIG{flags.signal}"]
    options = (
        *(() if flags.model is None else (str(flags.model),)),
        *("--worker-processes", "--pipeline-parallel", str(flags.stages), "--dtype", "float32"),
        *("--max-batch-size", "16", "--max-batch-tokens", str(n_positions), "--access-log", "off"),
        *("--n-slots", str(2 * N_STREAMS * n_positions)),
        *("--max-restarts", "100", "--iteration-timeout", str(flags.iteration_timeout)),
    )
    with ServerProcess(options) as server:
        server.wait_until_ready(600)
        done = iter(track(range(flags.kills), "faults", console=console))
        next(done, None)
        report = make_faults(
            server,
            known,
            [number] * flags.kills,
            seed=flags.seed,
            on_fault=lambda fault: next(done, None),
        )
        if server.stop() != 0:
            report.failures.append("after SIGTERM the server did not end with status 0")
    Console(width=150).print(table(report.faults))
    for failure in report.failures:
        console.print(failure, markup=False)
    print(json.dumps(_summary(report, flags.signal, flags.stages)))
    sys.exit(1 if report.failures else 0)


def _summary(report: Report, name: str, n_stages: int) -> dict[str, object]:
    faults = [asdict(fault) for fault in report.faults]

    def of(figure: str) -> dict[str, float]:
        values = [fault[figure] for fault in faults] or [0.0]
        return {"median": round(median(values), 3), "max": round(max(values), 3)}

    return {
        "benchmark": "worker_faults",
        "signal": name,
        "stages": n_stages,
        "faults": len(faults),
        "fewest_streams_hit": min((fault.n_between for fault in report.faults), default=0),
        "streams": report.n_streams,
        "sure_requests": report.n_sure,
        "seconds_to_notice": of("noticed"),
        "seconds_to_token": of("recovered"),
        "seconds_server_says": of("reported"),
        "failures": len(report.failures),
    }


if __name__ == "__main__":
    main()
