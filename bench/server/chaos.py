"""Requests while everything happens at once: clients leave, workers are killed or stopped, weights change.

    python -m bench.server.chaos [MODEL] [--requests 1000] [--clients 16] [--seed 0]

Starts `orca serve` with two worker processes and the demo model unless MODEL is given, and sends requests
over HTTP and gRPC, streamed and not, greedy and with seeds, stop texts and log-probabilities. Meanwhile
clients disconnect, workers are killed (SIGKILL: one, both, or one again and again), stopped for 20 seconds
(SIGSTOP), and the engine is paused, put to sleep, and given new weights: the same ones, and others, which are
made here. Often a worker is killed during such a change.

Every request has run alone before, in an engine of this process, with both weights. The command counts

- mismatches: outputs that are not those of the same request alone, with the weights of the version that the
  answer names. Outputs that differ first at a choice that rounding can change (within 1e-4 of logits) are
  counted as near ties. An output that continued through a change of weights must be the tokens of the old
  ones and then the new ones' continuation of them; this is checked for greedy requests.
- lost requests: no answer, or an error that no disturbance explains. A sleeping engine refuses requests, and
  a change with running="abort" ends them: both are sent again.
- blamed requests: ended with an error because workers were killed, although they were killed from outside.

Prints the counts, what happened, and as the last line JSON. Exits with 1 unless all three counts are 0, and
the server is at rest at the end and ends with status 0.
"""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import grpc
from rich.console import Console

from bench.server.chaos_requests import (
    DOORS,
    Answer,
    ChaosRequest,
    Refused,
    Sender,
    Verdict,
    Weights,
    common_length,
    difference,
    drawn_requests,
    greedy,
    write_changed,
)
from bench.server.http_client import Exchange, get, post
from bench.server.server_process import ServerProcess
from bench.server.sure_choices import MARGIN
from bench.server.worker_faults import figures, worker_pids
from orca_jax import LLM
from orca_jax.model_files.found_model import DEMO_MODEL

ADMIN_KEY = "admin-of-chaos"
MAX_BATCH_SIZE = 8
MAX_BATCH_TOKENS = 128
N_SLOTS = 2048  # too few for a full batch of the longest, so that requests are preempted too
STOPPED_SECONDS = 20.0
REQUEST_SECONDS = 600.0  # the most that an answer may take
ADMIN_SECONDS = 300.0
_AGAIN_SECONDS = 0.2  # before a refused request is sent again
_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 120.0  # the next disturbance comes then, though too few answers came
_REST_SECONDS = 60.0
_MAX_SHOWN = 20
AT_REST = (
    "orca_num_requests_running",
    "orca_num_requests_waiting",
    "orca_live_streams",
    "orca_slots_reserved",
)

# Asleep, or about to be; ending requests; running requests continue with other weights.
Change = Literal["sleeping", "ending", "continuing"]
RUNNING = ("finish", "continue", "abort")
# Each kind of fault and of change, as often as it shall come among the others.
FAULTS = ("kill",) * 6 + ("kill both",) * 2 + ("kill again", "stop")
CHANGES = ("pause", "pause", "sleep", "sleep", "same weights", "other weights", "other weights")


@dataclass(frozen=True, slots=True)
class Sent:
    """A request with its answer, and when it was sent and answered, by `Spans.now`."""

    request: ChaosRequest
    answer: Answer
    began: float
    ended: float


@dataclass(slots=True)
class Report:
    """All that was seen; `failures` names what must not be."""

    verdicts: Counter[Verdict] = field(default_factory=Counter[Verdict])
    lost: list[str] = field(default_factory=list[str])
    blamed: list[str] = field(default_factory=list[str])
    mismatches: list[str] = field(default_factory=list[str])
    failures: list[str] = field(default_factory=list[str])
    happened: Counter[str] = field(default_factory=Counter[str])
    figures: dict[str, float] = field(default_factory=dict[str, float])
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether all is well."""
        return not (self.lost or self.blamed or self.mismatches or self.failures)


class Spans:
    """When changes of each kind were under way: from before they were asked for until after the answer."""

    def __init__(self) -> None:
        self._spans: list[tuple[Change, float, float]] = []

    @staticmethod
    def now() -> float:
        """The moment, as spans have it."""
        return time.monotonic()

    @contextmanager
    def under_way(self, change: Change) -> Iterator[None]:
        """Note that a change is under way inside of this context."""
        number = len(self._spans)
        self._spans.append((change, self.now(), math.inf))
        try:
            yield
        finally:
            self._spans[number] = (*self._spans[number][:2], self.now())

    def overlap(self, change: Change, began: float, ended: float) -> bool:
        """Whether a change of this kind was under way at any time from `began` to `ended`."""
        return any(kind == change and start <= ended and end >= began for kind, start, end in self._spans)


class Chaos:
    """Clients and disturbances of one server. `weights` are the original ones and others."""

    def __init__(
        self,
        server: ServerProcess,
        weights: Sequence[Weights],
        requests: Sequence[ChaosRequest],
        rng: random.Random,
        report: Report,
        say: Callable[[str], object],
    ) -> None:
        self.sent: list[Sent] = []
        self.spans = Spans()
        self.weights_of = {0: weights[0]}  # by version
        self.weights = weights
        self._server = server
        self._requests = requests
        self._rng = rng
        self._report = report
        self._say = say
        self._n_left = 0
        self._over = asyncio.Event()
        self._n_ended = 0

    async def run(self, n: int, n_clients: int) -> None:
        """Send `n` requests that are answered, and others whose clients leave, from `n_clients` at once."""
        self._n_left = n
        async with grpc.aio.insecure_channel(self._server.grpc_address) as channel:
            sender = Sender(self._server.http_address, channel)
            async with asyncio.TaskGroup() as group:
                disturbing = [
                    group.create_task(self._disturb(FAULTS, self._fault, 20)),
                    group.create_task(self._disturb(CHANGES, self._change, 20)),
                ]
                clients = [
                    group.create_task(self._client(sender, random.Random(self._rng.getrandbits(64))))
                    for _ in range(n_clients)
                ]
                await asyncio.wait(clients)
                self._over.set()
                await asyncio.wait(disturbing)

    # Clients

    async def _client(self, sender: Sender, rng: random.Random) -> None:
        while self._n_left > 0:
            request, door = rng.choice(self._requests), rng.choice(DOORS)
            if rng.random() < 0.12:
                with suppress(Refused, OSError, EOFError, ValueError):
                    await sender.send(request, door, leave_after=3 * rng.random() ** 2)
                self._report.happened["clients that left"] += 1
                continue
            self._n_left -= 1
            self._report.happened[f"requests over {door}"] += 1
            await self._answered(sender, request, door)
            self._n_ended += 1

    async def _answered(self, sender: Sender, request: ChaosRequest, door: Any) -> None:
        """Send a request until it is answered or lost."""
        first = time.monotonic()
        while True:
            began = Spans.now()
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    answer = await sender.send(request, door)
            except Refused as error:
                why = self._why_refused(error, began)
                if why is None:
                    blamed = "so it is not retried" in error.message
                    (self._report.blamed if blamed else self._report.lost).append(f"{door}: {error}")
                    return
                self._report.happened[f"sent again: {why}"] += 1
                if time.monotonic() - first > REQUEST_SECONDS:
                    self._report.lost.append(f"{door}: refused for {REQUEST_SECONDS:g} s: {error}")
                    return
                await asyncio.sleep(_AGAIN_SECONDS)
            except (OSError, EOFError, ValueError, LookupError) as error:
                self._report.lost.append(f"{door}: {type(error).__name__}: {error}")
                return
            else:
                self.sent.append(Sent(request, answer, began, Spans.now()))
                return

    def _why_refused(self, error: Refused, began: float) -> str | None:
        """The disturbance that explains an error; None if none does."""
        now = Spans.now()
        if "the engine is asleep" in error.message and self.spans.overlap("sleeping", began, now):
            return "asleep"
        if error.code in ("cancelled", "CANCELLED") and self.spans.overlap("ending", began, now):
            return "ended by a change"
        return None

    # Disturbances

    async def _disturb(
        self, kinds: Sequence[str], act: Callable[[str], Awaitable[None]], n_answers: int
    ) -> None:
        """Act again and again, each kind as often as in `kinds`, about every `n_answers` answers."""
        rng = random.Random(self._rng.getrandbits(64))
        deck = list[str]()
        while not self._over.is_set():
            after = self._n_ended + rng.randrange(n_answers // 2, 3 * n_answers // 2)
            latest = time.monotonic() + _PATIENCE_SECONDS
            while self._n_ended < after and time.monotonic() < latest and not self._over.is_set():
                await asyncio.sleep(_LOOK_SECONDS)
            if self._over.is_set():
                return
            if not deck:
                deck = rng.sample(kinds, len(kinds))
            kind = deck.pop()
            self._report.happened[kind] += 1
            self._say(f"{self._n_ended} answers; {kind}")
            await act(kind)

    async def _fault(self, kind: str) -> None:
        pids = worker_pids(self._server)
        stage = self._rng.randrange(len(pids))
        if kind == "stop":
            _send(pids[stage], signal.SIGSTOP)
            await asyncio.sleep(STOPPED_SECONDS)
            if pids[stage] in worker_pids(self._server):
                _send(pids[stage], signal.SIGCONT)
        elif kind == "kill both":
            for pid in pids:
                _send(pid, signal.SIGKILL)
        else:
            _send(pids[stage], signal.SIGKILL)
        if kind == "kill again":
            for _ in range(2):
                await self._kill_when_restarted(stage)

    async def _kill_when_restarted(self, stage: int) -> None:
        """Kill a stage's next process, at a random moment of its start or soon afterwards."""
        before = worker_pids(self._server)[stage]
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                while worker_pids(self._server)[stage] == before:
                    await asyncio.sleep(_LOOK_SECONDS)
        await asyncio.sleep(20 * self._rng.random())
        _send(worker_pids(self._server)[stage], signal.SIGKILL)

    async def _change(self, kind: str) -> None:
        """Make a change of the engine; in two of five, a worker is killed at the same time."""
        killing = None
        if self._rng.random() < 0.4:
            self._report.happened["kill during a change"] += 1
            killing = asyncio.create_task(self._kill_after(3 * self._rng.random() ** 2))
        running = self._rng.choice(RUNNING)
        if kind == "pause":
            await self._admin("pause", running=running)
            await asyncio.sleep(2 * self._rng.random())
            await self._admin("resume")
        elif kind == "sleep":
            with self.spans.under_way("sleeping"):
                await self._admin("sleep", running=running, level=self._rng.randrange(1, 3))
                await asyncio.sleep(2 * self._rng.random())
                while not await self._admin("wake_up"):
                    await asyncio.sleep(1)
        else:
            await self._update(kind, running)
        if killing is not None:
            await killing

    async def _update(self, kind: str, running: str) -> None:
        state = await self._state()
        current = self.weights_of[state["weights_version"]]
        weights = current if kind == "same weights" else self.weights[1 - self.weights.index(current)]
        version = max(self.weights_of) + 1
        self.weights_of[version] = weights
        mixes = weights is not current and running == "continue"
        with self.spans.under_way("continuing") if mixes else nullcontext():
            directory = str(weights.directory)
            await self._admin("update_weights", running=running, directory=directory, version=version)

    async def _kill_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        _send(self._rng.choice(worker_pids(self._server)), signal.SIGKILL)

    async def _admin(self, route: str, **body: Any) -> bool:
        """Ask for a change; return whether it was made."""
        running = body.get("running", "")
        if running:
            body["timeout"] = ADMIN_SECONDS
        with self.spans.under_way("ending") if running == "abort" else nullcontext():
            status, answer = await self._asked(post, f"/admin/{route}", body)
        self._report.happened[f"{route} {running}".strip() + ("" if status == 200 else f": {status}")] += 1
        if status != 200:
            self._say(f"{route} {running}: {status} {answer}")
        return status == 200

    async def _state(self) -> dict[str, Any]:
        return (await self._asked(get, "/admin/state"))[1]

    async def _asked(self, method: Callable[..., bytes], path: str, *body: Any) -> tuple[int, dict[str, Any]]:
        address = self._server.http_address
        head, end, rest = method(*address, path, *body).partition(b"\r\n\r\n")
        content = head + f"\r\nAuthorization: Bearer {ADMIN_KEY}".encode() + end + rest
        async with asyncio.timeout(2 * ADMIN_SECONDS), Exchange(*address, content) as exchange:
            await exchange.head()
            return exchange.status, await exchange.json()


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def judge(chaos: Chaos, report: Report, prompts: Mapping[ChaosRequest, tuple[int, ...]]) -> None:
    """Compare all answers with those of the same requests alone."""
    mixed = list[Sent]()
    for sent in chaos.sent:
        weights = chaos.weights_of[sent.answer.version]
        differs = difference(sent.request, weights.alone(sent.request), sent.answer)
        if differs is None:
            report.verdicts["equal"] += 1
        elif chaos.spans.overlap("continuing", sent.began, sent.ended):
            if sent.request.seed is not None or sent.request.stop:
                report.verdicts["mixed, not judged"] += 1
            else:
                mixed.append(sent)
        elif _is_near_tie(weights, sent, prompts[sent.request]):
            report.verdicts["near tie"] += 1
        else:
            report.mismatches.append(f"{sent.request}, version {sent.answer.version}: {differs}")
    if mixed:
        with ExitStack() as stack:
            engines = [stack.enter_context(weights.engine()) for weights in chaos.weights]
            for sent in mixed:
                _judge_mixed(sent, engines, report, prompts[sent.request])


def _is_near_tie(weights: Weights, sent: Sent, prompt: Sequence[int]) -> bool:
    alone = weights.alone(sent.request).token_ids
    same = common_length(alone, sent.answer.token_ids)
    return same < len(alone) and weights.n_sure(sent.request, prompt) <= same


def _judge_mixed(sent: Sent, engines: Sequence[LLM], report: Report, prompt: tuple[int, ...]) -> None:
    """Judge an output that may have continued with other weights, perhaps several times."""
    request, tokens, done = sent.request, sent.answer.token_ids, 0
    while done < request.max_tokens:
        # How far each set of weights continues the output so far in the same way.
        continued = [
            greedy(engine, (*prompt, *tokens[:done]), request.max_tokens - done) for engine in engines
        ]
        same = [common_length(one.token_ids, tokens[done:]) for one in continued]
        further = max(same)
        done += further
        if further == 0:
            if min(one.gaps[0] for one in continued) < MARGIN:
                report.verdicts["near tie"] += 1
            else:
                report.mismatches.append(f"{request}: {tokens} is of no weights from token {done} on")
            return
    report.verdicts["mixed"] += 1


async def _rest(server: ServerProcess, report: Report) -> None:
    """Check that nothing is left in the server."""
    deadline = time.monotonic() + _REST_SECONDS
    while True:
        now = await figures(server.http_address)
        left = {name: now[name] for name in AT_REST if now[name]}
        if not left or time.monotonic() > deadline:
            break
        await asyncio.sleep(_AGAIN_SECONDS)
    if left:
        report.failures.append(f"{_REST_SECONDS:g} s after the last answer the server has {left}")
    names = ("losses", "recoveries", "blamed_requests", "last_recovery_seconds")
    report.figures = {
        name: now.get(f"orca_worker_{name}_total", now.get(f"orca_worker_{name}", 0.0)) for name in names
    }
    if report.figures["blamed_requests"] != len(report.blamed):
        report.failures.append(f"the server blamed {report.figures['blamed_requests']:.0f} requests")


def play(
    directory: Path,
    other: Path,
    *,
    n: int,
    n_clients: int,
    n_distinct: int,
    longest: int,
    seed: int,
    say: Callable[[str], object],
) -> Report:
    """Send `n` requests to a server of the checkpoint in `directory`, whose other weights are in `other`."""
    rng = random.Random(seed)
    report = Report()
    requests = drawn_requests(n_distinct, longest, rng)
    weights = [Weights(directory), Weights(other)]
    prompts: dict[ChaosRequest, tuple[int, ...]] = {}
    for one in weights:
        prompts = one.run_alone(requests)
        say(f"{len(requests)} requests ran alone with {one.directory}")
    flags = (
        *(str(directory), "--worker-processes", "--pipeline-parallel", "2", "--dtype", "float32"),
        *("--max-batch-size", str(MAX_BATCH_SIZE), "--max-batch-tokens", str(MAX_BATCH_TOKENS)),
        *("--n-slots", str(N_SLOTS), "--max-restarts", "1000", "--access-log", "off"),
    )
    began = time.monotonic()
    with ServerProcess(flags, variables={"ORCA_ADMIN_KEYS": ADMIN_KEY}) as server:
        server.wait_until_ready(ADMIN_SECONDS)
        chaos = Chaos(server, weights, requests, rng, report, say)
        asyncio.run(chaos.run(n, n_clients))
        asyncio.run(_rest(server, report))
        status = server.stop(ADMIN_SECONDS)
        if status != 0:
            report.failures.append(f"after SIGTERM the server ended with {status}: {server.stderr()[-2000:]}")
        if "Traceback" in server.stderr():
            start = server.stderr().index("Traceback")
            report.failures.append(f"a traceback: {server.stderr()[start : start + 3000]}")
    report.seconds = time.monotonic() - began
    judge(chaos, report, prompts)
    return report


def main() -> None:
    """Run it, and print the counts and, as the last line, JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.server.chaos", description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="a directory (default: the demo model)")
    parser.add_argument("--requests", type=int, default=1000, help="answers to get (default: 1000)")
    parser.add_argument("--clients", type=int, default=16, help="requests at once (default: 16)")
    parser.add_argument("--distinct", type=int, default=120, help="different requests (default: 120)")
    parser.add_argument("--longest", type=int, default=80, help="most output tokens (default: 80)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    flags = parser.parse_args()
    console = Console(stderr=True, highlight=False)
    began = time.monotonic()
    directory = flags.model or DEMO_MODEL
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        write_changed(directory, other, seed=flags.seed)
        report = play(
            directory,
            other,
            n=flags.requests,
            n_clients=flags.clients,
            n_distinct=flags.distinct,
            longest=flags.longest,
            seed=flags.seed,
            say=lambda line: console.print(f"{time.monotonic() - began:6.0f} s  {line}", markup=False),
        )
    for kind in ("mismatches", "lost", "blamed", "failures"):
        for what in getattr(report, kind)[:_MAX_SHOWN]:
            console.print(f"{kind}: {what}", markup=False)
    for what, n in sorted(report.happened.items()):
        console.print(f"{n:5}  {what}", markup=False)
    print(json.dumps(summary(report, flags.requests)))
    sys.exit(0 if report.passed else 1)


def summary(report: Report, n: int) -> dict[str, Any]:
    """The figures, for the last line."""
    return {
        "benchmark": "chaos",
        "requests": n,
        "mismatches": len(report.mismatches),
        "lost": len(report.lost),
        "blamed": len(report.blamed),
        "failures": len(report.failures),
        "outputs": dict(report.verdicts),
        "happened": dict(sorted(report.happened.items())),
        "server": report.figures,
        "seconds": round(report.seconds),
    }


if __name__ == "__main__":
    main()
