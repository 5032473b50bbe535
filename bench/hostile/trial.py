"""A server with its neighbours, attacked repeatedly: what each attack cost them and the server."""

import re
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Self

from bench.hostile.attacker import BUSY, GRACE_SECONDS, Order, attacker
from bench.hostile.footprint import Footprint, Watched
from bench.hostile.neighbours import Waits, neighbours
from bench.hostile.target import Answers
from bench.other_process import OtherProcess
from bench.server.server_process import ServerProcess, cpu_seconds

FLAGS = ("--max-batch-tokens=512",)  # as few programs as the demo model's positions allow; otherwise defaults
SETTLED_SECONDS = 0.2  # after a second without a longer wait than this, an attack's effects are over
SETTLE_SECONDS = 20.0  # after this the server counts as blocked for good
_LOOK_SECONDS = 1.0
_WARM_SECONDS = 3.0
_ASK_SECONDS = 30.0
_HOLD = re.compile(
    r'^orca_(longest_hold_seconds|long_holds_total)\{what="(event loop|gil)"\} (\S+)$', re.MULTILINE
)
_HELD = re.compile(r"^.* was held for .*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Holds:
    """Holds of the server's event loop and GIL, by its own watchdog: longest in seconds, and long ones."""

    loop: float
    gil: float
    n_loop: float
    n_gil: float


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one attack, or of a period without one (`answers` None).

    `holds` are the server's holds during the attack, `held` its log lines about them, and `attacker_cores`
    the attacker's processor time per second.

    `seconds` is the time from the attack's beginning until the neighbours were served as before. If that took
    longer than SETTLE_SECONDS, `blocked` is set, and later attacks were measured on a new server.
    """

    name: str
    waits: Waits
    seconds: float
    before: Footprint
    most: Footprint
    after: Footprint
    answers: Answers | None
    blocked: bool
    holds: Holds = Holds(0.0, 0.0, 0.0, 0.0)
    held: tuple[str, ...] = ()
    attacker_cores: float = 0.0


class Trial:
    """A context manager that starts and stops all processes; replaces a `server` blocked for good."""

    def __init__(self) -> None:
        self.n_servers = 0
        self.traceback = ""  # the first in a server's log
        self._stack = ExitStack()
        self._attacker = OtherProcess(attacker)

    def __enter__(self) -> Self:
        self._attacker.__enter__()
        try:
            self._start()
        except BaseException:
            self._attacker.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop(kill=True)
        self._attacker.__exit__()

    def _start(self) -> None:
        self.n_servers += 1
        with ExitStack() as stack:
            self.server = ServerProcess(FLAGS, compile_ahead=True)
            stack.callback(self.server.kill)
            self.server.wait_until_ready()
            self._neighbours = stack.enter_context(OtherProcess(neighbours))
            self._neighbours.ask(self.server.http_address)
            self._stack = stack.pop_all()
        time.sleep(_WARM_SECONDS)
        self._waits()

    def _stop(self, *, kill: bool = False) -> int:
        """Stop neighbours and server; return the server's exit status, -1 if it was killed."""
        status = -1
        try:
            if not kill:
                self._neighbours.__exit__()  # before the server, or they would report its end
                status = self.server.stop()
        finally:
            stderr = self.server.stderr()
            if "Traceback" in stderr and not self.traceback:
                begin = stderr.index("Traceback")
                self.traceback = stderr[begin : begin + 20_000][-2000:]
            self._stack.close()
        return status

    def finish(self) -> int:
        """Stop the server as an operator would; return its exit status."""
        return self._stop()

    def footprint(self) -> Footprint:
        """The server's current footprint."""
        return Footprint.of(self.server.pid)

    def quiet(self, seconds: float) -> Cost:
        """The neighbours' waits without an attacker."""
        with Watched(self.server.pid) as watched:
            self._holds()
            self._waits()
            time.sleep(seconds)
            waits = self._waits()
        return Cost(
            "(no attack)",
            waits,
            seconds,
            watched.before,
            watched.most,
            self.footprint(),
            None,
            blocked=False,
            holds=self._holds(),
        )

    def busy(self, seconds: float) -> Cost:
        """The neighbours' waits while the attacker's process computes and sends nothing."""
        return replace(self.attack(BUSY, seconds), name="(a busy core)", answers=None)

    def attack(self, name: str, seconds: float, number: int = 0) -> Cost:
        """Run one attack, and wait until the neighbours are served as before."""
        order = Order(name, self.server.http_address, self.server.grpc_address, seconds, number)
        with Watched(self.server.pid) as watched:
            before, n_said = self._holds(), len(self.server.stderr())
            cpu = cpu_seconds(self._attacker.pid)
            self._waits()
            start = time.monotonic()
            answers: Answers = self._attacker.ask(order, seconds=seconds + GRACE_SECONDS + _ASK_SECONDS)
            cpu = cpu_seconds(self._attacker.pid) - cpu
            waits, settled = self._settled()
            took = time.monotonic() - start
        cost = Cost(
            name,
            waits,
            took,
            watched.before,
            watched.most,
            self.footprint(),
            answers,
            blocked=not settled,
            held=tuple(_HELD.findall(self.server.stderr()[n_said:])),
            attacker_cores=cpu / seconds,
        )
        if settled:
            after = self._holds()
            holds = replace(after, n_loop=after.n_loop - before.n_loop, n_gil=after.n_gil - before.n_gil)
            cost = replace(cost, holds=holds)
        if not settled:
            self._stop(kill=True)
            self._start()
        return cost

    def _settled(self) -> tuple[Waits, bool]:
        """Wait until no wait was long for a second; return all waits, and whether that happened in time."""
        waits = self._waits()
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            last = self._waits()
            waits = longer(waits, last)
            if max(last.between, last.health) < SETTLED_SECONDS and last.n_streams and not last.n_wrong:
                return waits, True
        return waits, False

    def _holds(self) -> Holds:
        """The longest holds since the last call (unless an attack reads /metrics too), and counts of all."""
        with urllib.request.urlopen(f"{self.server.url}/metrics", timeout=_ASK_SECONDS) as answer:
            found = {
                (name, what): float(value) for name, what, value in _HOLD.findall(answer.read().decode())
            }
        longest, number = "longest_hold_seconds", "long_holds_total"
        return Holds(
            found[longest, "event loop"],
            found[longest, "gil"],
            found[number, "event loop"],
            found[number, "gil"],
        )

    def _waits(self) -> Waits:
        return self._neighbours.ask(None, seconds=_ASK_SECONDS)


def longer(first: Waits, second: Waits) -> Waits:
    """The longer of each wait."""
    return Waits(
        max(first.between, second.between),
        max(first.first, second.first),
        max(first.health, second.health),
        first.n_streams + second.n_streams,
        first.n_probes + second.n_probes,
        first.n_wrong + second.n_wrong,
        (*first.wrong, *second.wrong)[:5],
        max(first.long, second.long),
    )
