"""Workers that are killed or stopped under load: no token is lost or doubled."""

import asyncio
import json
import os
import random
import signal
from pathlib import Path

import pytest

from bench.server.repeated_streams import KnownStream, RepeatedStreams, asked
from bench.server.server_process import ServerProcess
from bench.server.worker_faults import N_BETWEEN, Fault, known_streams, make_faults, worker_pids
from tests.whole.workers.worker_harness import (
    MAX_PROMPT,
    N_OUTPUT,
    N_STREAMS,
    SIZES,
    SOON,
    is_there,
    until,
    write_model,
)

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
ITERATION_SECONDS = 4.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def known(model: Path) -> list[KnownStream]:
    return known_streams(model, n=N_STREAMS, n_output=N_OUTPUT, longest=MAX_PROMPT)


def serve(model: Path, *flags: str) -> ServerProcess:
    return ServerProcess((str(model), "--worker-processes", "--pipeline-parallel", "2", *SIZES, *flags))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_and_stopped_workers_lose_no_token_and_double_none(
    model: Path, known: list[KnownStream]
) -> None:
    signals = [KILL, KILL, STOP, KILL]
    flags = ("--iteration-timeout", f"{ITERATION_SECONDS:g}", "--worker-timeout", "6", "--max-restarts", "20")
    with serve(model, *flags) as server:
        server.wait_until_ready(SOON)
        first = worker_pids(server)
        report = make_faults(server, known, signals, seed=3)
        assert not report.failures, "\n".join(report.failures)
        stderr = server.stderr()
        last = worker_pids(server)
        assert server.stop() == 0
        until(lambda: not any(map(is_there, {*first, *last})), "the workers' end", 10)
    assert len(report.faults) == len(signals) and {fault.stage for fault in report.faults} == {1, 2}
    assert report.n_streams >= len(known) and report.n_sure >= 0.75 * len(known)
    for number, fault in zip(signals, report.faults, strict=True):
        check_fault(number, fault)
    assert stderr.count("the workers are up again after") == len(signals)
    assert "Traceback" not in server.stderr()


def check_fault(number: signal.Signals, fault: Fault) -> None:
    """A kill is noticed at once, by the line; a stop by the deadline, which names the stage that is late.

    The late stage may be the one after the stopped stage, if that has not sent its hidden states. The stage
    after a killed one may report first that its device cannot continue.
    """
    assert fault.n_between >= N_BETWEEN
    assert fault.reported <= fault.recovered + 1.0
    if number is KILL:
        assert fault.noticed < ITERATION_SECONDS
        lost = (f"stage {fault.stage}: its line broke: ", f"stage {fault.stage + 1}: JaxRuntimeError: ")
        assert fault.reason.startswith(lost), fault.reason
    else:
        assert fault.noticed >= ITERATION_SECONDS - 0.5
        late = tuple(f"stage {stage}: did not " for stage in (fault.stage, 2))
        assert fault.reason.startswith(late), fault.reason
    assert fault.reason.endswith("; its requests run again when the workers are up")


@pytest.mark.long
def test_past_the_bound_everybody_hears_the_cause_and_the_workers_end_with_the_server(
    model: Path, known: list[KnownStream]
) -> None:
    with serve(model, "--max-restarts", "0") as server:
        server.wait_until_ready(SOON)
        pids = worker_pids(server)
        streams = asyncio.run(_streams_over_a_kill(server, known, random.Random(1).choice(pids)))
        cause = "workers were lost 1 times within 600 seconds, and 0 restarts are allowed; the last: stage "
        assert all(ended.error is not None and cause in ended.error for ended in streams.ended), streams.ended
        assert not any(ended.reasons for ended in streams.ended)
        status, body = asyncio.run(asked(server.http_address, "/ready"))
        ready = json.loads(body)
        assert (status, ready["status"]) == (503, "failed") and cause in ready["reason"]
        (refused,) = asyncio.run(_once(server, known[:1])).ended
        assert refused.status == 503 and cause in str(refused.error)
        server.stop()
        until(lambda: not any(map(is_there, pids)), "the workers' end", 10)
    assert "Traceback" not in server.stderr()


async def _streams_over_a_kill(server: ServerProcess, known: list[KnownStream], pid: int) -> RepeatedStreams:
    """Run all streams until each has ended with an error; return those that had not ended before."""
    async with asyncio.timeout(SOON), RepeatedStreams(server.http_address, known) as streams:
        while streams.n_between < N_BETWEEN:
            await streams.arrival()
        os.kill(pid, KILL)
        streams.ended.clear()
        while len(streams.ended) < len(known):
            await asyncio.sleep(0.02)
    return streams


async def _once(server: ServerProcess, known: list[KnownStream]) -> RepeatedStreams:
    async with asyncio.timeout(SOON), RepeatedStreams(server.http_address, known, once=True) as streams:
        pass
    return streams


@pytest.mark.long
def test_when_the_server_is_killed_its_workers_end_by_themselves(model: Path) -> None:
    server = serve(model)
    try:
        server.wait_until_ready(SOON)
        pids = worker_pids(server)
        assert all(map(is_there, pids))
        server.signal(signal.SIGKILL)
        assert server.wait(SOON) == -signal.SIGKILL
        until(lambda: not any(map(is_there, pids)), "the workers' end", 10)
    finally:
        server.kill()
