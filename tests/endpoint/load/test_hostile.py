"""The parts of the hostile-client benchmark: attacks, neighbours that measure, and verdicts."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

import pytest

from bench.hostile.attacker import ATTACKS, Order, attack
from bench.hostile.footprint import Footprint, Watched
from bench.hostile.neighbours import N_STREAMS, Waits, neighbours
from bench.hostile.report import Report, attack_table, round_table, summary
from bench.hostile.target import Answers, message_of
from bench.hostile.trial import Cost, longer
from bench.other_process import OtherProcess
from tests.endpoint.harness import Server, serving, until
from tests.host.engines import SOON

HELD_SECONDS = 0.6
QUICK = ("half-sent-headers", "pipelining", "infinities", "reused-ids", "stop-strings")


def address(server: Server) -> tuple[str, int]:
    parts = urlsplit(server.url)
    return parts.hostname or "", parts.port or 0


@pytest.mark.parametrize("name", QUICK)
def test_an_attack_ends_in_time_and_records_the_responses(server: Server, name: str) -> None:
    start = time.monotonic()
    answers = asyncio.run(attack(Order(name, address(server), server.grpc_address, seconds=0.5)))
    assert time.monotonic() - start < SOON
    assert answers.n.total() > 0
    assert "had to be stopped" not in answers.n
    until(server.at_rest, "rest")


def test_each_attack_has_a_description() -> None:
    assert len(ATTACKS) >= 25
    assert all(cost_with.__doc__ for cost_with in ATTACKS.values())


def waits_until(clients: OtherProcess, enough: Callable[[Waits], bool]) -> Waits:
    """The neighbours' observations, once they are `enough`."""
    seen: Waits = clients.ask(None)

    def look() -> bool:
        nonlocal seen
        seen = longer(seen, clients.ask(None))
        return enough(seen)

    until(look, "what the neighbours were to see")
    return seen


def settled(clients: OtherProcess, server: Server) -> None:
    """Let the neighbours connect, and discard the observations of that time."""
    clients.ask(address(server))
    waits_until(clients, lambda waits: waits.n_streams >= N_STREAMS)


def quiet_waits(clients: OtherProcess) -> Waits:
    """Observations with no long wait in them, of several tries: a busy machine makes all wait."""
    for _ in range(8):
        seen = waits_until(clients, lambda waits: waits.n_streams >= N_STREAMS and waits.n_probes >= 10)
        if max(seen.between, seen.health) < 0.8 * HELD_SECONDS:
            return seen
    pytest.fail("the neighbours waited long although nothing held them")


def test_neighbours_notice_only_a_blocked_loop() -> None:
    with serving(seconds=0.002) as server, OtherProcess(neighbours) as clients:
        settled(clients, server)
        quiet = quiet_waits(clients)
        server.call(lambda: time.sleep(HELD_SECONDS))
        blocked = waits_until(clients, lambda waits: waits.n_streams >= N_STREAMS)
    assert quiet.n_wrong == blocked.n_wrong == 0, (quiet.wrong, blocked.wrong)
    assert min(blocked.between, blocked.health) >= 0.8 * HELD_SECONDS


def test_neighbours_notice_an_unfinished_wait() -> None:
    over = threading.Event()
    with serving(seconds=0.002) as server, OtherProcess(neighbours) as clients:
        settled(clients, server)
        server.loop.call_soon_threadsafe(over.wait, SOON)
        try:
            waits_until(clients, lambda waits: min(waits.between, waits.health) > HELD_SECONDS)
        finally:
            over.set()


def holds(connection: Connection) -> None:
    """A process that, for each number it reads, holds that many more bytes and one more open file."""
    blocked: list[object] = []
    with suppress(EOFError):
        while True:
            blocked += [os.urandom(connection.recv()), open(os.devnull, "rb")]  # noqa: SIM115
            connection.send(None)


def test_a_footprint_measures_memory_and_open_files() -> None:
    # Not this process: other tests' servers left memory in it that may be freed at any time.
    with OtherProcess(holds) as other:
        other.ask(0)  # it has started
        with Watched(other.pid) as watched:
            other.ask(64 << 20)
            until(lambda: watched.most.rss > watched.before.rss + (32 << 20), "the memory")
            until(lambda: watched.most.files > watched.before.files, "the file")


def test_the_message_of_a_response() -> None:
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n\r\n"
    assert message_of(head + b'{"error":{"message":"no","type":"x"}}') == "no"
    assert message_of(head + b"no JSON") == "no JSON"
    assert message_of(b"HTTP/1.1 400") == ""


# Verdicts

WAITS = Waits(0.02, 0.1, 0.01, 50, 100, 0, ())
SIZE = Footprint(500 << 20, 20, 30)
QUIET = Cost("(no attack)", WAITS, 4.0, SIZE, SIZE, SIZE, None, blocked=False)


def cost_with(answers: Answers | None = None, *, blocked: bool = False, **waits: object) -> Cost:
    return replace(
        QUIET, name="bad", answers=answers or Answers(), blocked=blocked, waits=replace(WAITS, **waits)
    )  # pyright: ignore[reportArgumentType]


def report_of(*costs: Cost, rounds: list[Footprint] | None = None) -> Report:
    return Report(4.0, baseline=QUIET, costs=list(costs), rounds=rounds or [])


def answered(kind: str) -> Answers:
    answers = Answers()
    answers.note(kind, "a message")
    return answers


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        (cost_with(between=0.08), "a stream's gap was 0.080 s"),
        (cost_with(health=0.27), "/health was 0.270 s"),
        (cost_with(n_wrong=2, wrong=("refused",)), "2 failures of neighbours, first: refused"),
        (cost_with(blocked=True), "blocked"),
        (cost_with(answered("500")), "the attacker got 500: a message"),
        (cost_with(answered("INTERNAL")), "the attacker got INTERNAL"),
    ],
)
def test_a_violation_is_reported(cost: Cost, message: str) -> None:
    (failure,) = report_of(cost).failures()
    assert failure.startswith("bad: ") and message in failure
    assert summary(report_of(cost))["passed"] is False


def test_allowed_behaviour_is_not_reported() -> None:
    costs = [
        cost_with(between=0.06, first=9.0, health=0.25),
        cost_with(answered("503")),
        cost_with(answered("400")),
    ]
    report = report_of(*costs, rounds=[SIZE] * 10)
    assert report.failures() == []
    assert summary(report)["passed"] is True
    assert attack_table(report).row_count == 4 and round_table(report).row_count == 10


def test_an_attacker_that_takes_a_core_is_compared_with_a_busy_core() -> None:
    slow = cost_with(between=0.1)
    report = report_of(slow, replace(slow, name="busy", attacker_cores=0.9))
    report.busy = cost_with(between=0.06)
    (failure,) = report.failures()
    assert failure.startswith("bad: a stream's gap was 0.100 s, without an attacker 0.020 s")
    assert attack_table(report).row_count == 4


def test_growth_over_rounds_is_reported_but_a_constant_level_is_not() -> None:
    growing = [replace(SIZE, rss=SIZE.rss + (i * 30 << 20)) for i in range(10)]
    (failure,) = report_of(rounds=growing).failures()
    assert "memory grew" in failure
    level = [replace(SIZE, rss=SIZE.rss + (min(i, 2) * 30 << 20)) for i in range(10)]
    assert report_of(rounds=level).failures() == []
    (failure,) = report_of(rounds=[replace(SIZE, files=20 + 10 * i) for i in range(10)]).failures()
    assert "descriptors grew" in failure
    (failure,) = report_of(rounds=[replace(SIZE, threads=20 + 10 * i) for i in range(10)]).failures()
    assert "threads grew" in failure
