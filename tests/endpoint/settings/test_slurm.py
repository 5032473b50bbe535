"""deploy/slurm/orca.sbatch, run by bash with stand-ins for the commands of Slurm and for `orca`."""

import argparse
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from server import cli
from server.commands.worker import worker_options
from server.settings.serve_settings import serve_settings
from tests.places import ROOT

SCRIPT = ROOT / "deploy" / "slurm" / "orca.sbatch"
NODES = ["alpha", "beta", "gamma"]
MAX_RESTARTS = 5
SECONDS = 60.0  # the time limit of every test

# Each reports what it does to the test as lines of JSON, and ends soon after the test.
STAND_INS = {
    "scontrol": """
        assert sys.argv[1:] == ["show", "hostnames", "the[nodes]"], sys.argv
        print("alpha", "beta", "gamma", sep="\\n")
    """,
    "srun": """
        flags = [word for word in sys.argv[1:] if word.startswith("--")]
        n = next(i for i, word in enumerate(sys.argv[1:]) if not word.startswith("--"))
        said = dict(flag[2:].split("=") for flag in sys.argv[1 : n + 1])
        assert (said["nodes"], said["ntasks"], said["cpus-per-task"]) == ("1", "1", "8"), said
        os.environ["SLURMD_NODENAME"] = said["nodelist"]
        os.execvp(sys.argv[n + 1], sys.argv[n + 1 :])
    """,
    "hostname": """
        number = ["alpha", "beta", "gamma"].index(os.environ["SLURMD_NODENAME"]) + 1
        print(f"10.0.0.{number} fd00::{number} 192.168.7.{number} ")
    """,
    "orca": """
        def end(*_):
            tell("ended")
            os._exit(0)

        def tell(event):
            said = {"event": event, "node": os.environ.get("SLURMD_NODENAME"), "arguments": sys.argv[1:]}
            said["platforms"] = os.environ.get("JAX_PLATFORMS")
            path = sys.argv[sys.argv.index("--control-secret-file") + 1]
            if event == "started":
                said["secret"], said["mode"] = open(path).read(), os.stat(path).st_mode & 0o777
                said["folder_mode"] = os.stat(os.path.dirname(path)).st_mode & 0o777
            with open(os.environ["EVENTS"], "a") as events:
                events.write(json.dumps(said) + "\\n")

        signal.signal(signal.SIGTERM, end)
        tell("started")
        stage = sys.argv[sys.argv.index("--stage") + 1] if sys.argv[1] == "worker" else "server"
        plan = os.environ.get("PLAN_" + stage, "").split()  # the statuses of its first lives
        with open(os.environ["EVENTS"] + ".lives." + stage, "a+") as lives:
            lives.write("+")
            life = lives.tell() - 1
        if life < len(plan):
            os._exit(int(plan[life]))
        while True:
            signal.pause()
    """,
}


class Job:
    """The running script. `events` are those reported by the stand-ins for `orca` so far."""

    def __init__(self, folder: Path, *arguments: str, **plans: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.home = folder / "home"
        self.home.mkdir()
        programs = folder / "programs"
        programs.mkdir()
        for name, text in STAND_INS.items():
            lines = "\n".join(line[8:] for line in text.splitlines())
            head = f"#!{sys.executable} -I\nimport json, os, signal, sys\nsignal.alarm(120)\n"
            (programs / name).write_text(head + lines + "\n")
            (programs / name).chmod(0o755)
        fifo = folder / "events"
        os.mkfifo(fifo)
        # Opened for writing too, so that reading never sees end of file.
        self._events = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
        self._unread = b""
        self._deadline = time.monotonic() + SECONDS
        environment = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "HOME": str(self.home),
            "EVENTS": str(fifo),
            "SLURM_JOB_ID": "70123",
            "SLURM_JOB_NODELIST": "the[nodes]",
            "SLURM_CPUS_PER_TASK": "8",
            **{f"PLAN_{name}": plan for name, plan in plans.items()},
        }
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", SCRIPT, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    def events_of(self, event: str, name: str) -> list[dict[str, Any]]:
        """The events of this kind from `name`: "server", or the stage of a worker, such as "1"."""
        return [entry for entry in self.events if entry["event"] == event and _name(entry) == name]

    def wait(self, until: Callable[[], object]) -> None:
        """Read events until `until()` is true."""
        while not until():
            left = self._deadline - time.monotonic()
            assert left > 0, self.events
            self._read(left)

    def end(self) -> tuple[int, str]:
        """Wait for the script; return its exit status and stderr. `events` then has all events so far."""
        status = self.process.wait(max(1.0, self._deadline - time.monotonic()))
        while self._read(0.0):
            pass
        return status, self._log.read_text()

    def _read(self, seconds: float) -> bool:
        if not select.select([self._events], [], [], seconds)[0]:
            return False
        *whole, self._unread = (self._unread + os.read(self._events, 1 << 16)).split(b"\n")
        self.events += map(json.loads, whole)
        return True

    def close(self) -> None:
        """End the script, and any stand-ins that it left running."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                pid, (_, _, _, session, *_) = (
                    int(stat.parent.name),
                    stat.read_text().rpartition(")")[2].split(),
                )
                if int(session) == self.process.pid:
                    os.kill(pid, signal.SIGKILL)
        self.process.wait(SECONDS)
        os.close(self._events)


def _name(start: dict[str, Any]) -> str:
    arguments = start["arguments"]
    return arguments[arguments.index("--stage") + 1] if arguments[0] == "worker" else "server"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs = list[Job]()

    def start(*arguments: str, **plans: str) -> Job:
        jobs.append(Job(tmp_path, *arguments, **plans))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


Start = Callable[..., Job]


def _parsed(start: dict[str, Any], secret: Path) -> argparse.Namespace:
    args = cli.parser().parse_args(start["arguments"])
    args.control_secret_file = secret  # the job's own directory is gone
    return args


def test_bash_can_parse_it() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True, timeout=SECONDS)


def test_the_started_commands_are_consistent(start: Start, tmp_path: Path) -> None:
    job = start("the/model", "--max-batch-size", "7")
    job.wait(lambda: all(job.events_of("started", name) for name in ("server", "1", "2", "3")))
    (server,) = job.events_of("started", "server")
    workers = [worker for name in "123" for worker in job.events_of("started", name)]
    secret = tmp_path / "secret"
    secret.write_text(server["secret"])
    assert len(server["secret"]) == 64
    assert {event["secret"] for event in workers} == {server["secret"]}
    assert {(event["mode"], event["folder_mode"]) for event in (server, *workers)} == {(0o600, 0o700)}
    assert [event["node"] for event in workers] == NODES
    assert (server["node"], server["platforms"]) == (None, "cpu")

    settings = serve_settings(_parsed(server, secret), {})
    config = settings.engine
    addresses = list(config.workers or ())
    assert config.control_secret == server["secret"]
    assert addresses == ["10.0.0.1:20123", "10.0.0.2:20123", "10.0.0.3:20123"]
    assert (config.model, config.max_batch_size) == ("the/model", 7)
    assert settings.endpoint.host == "127.0.0.1"
    flags = [_parsed(worker, secret) for worker in workers]
    assert [each.listen for each in flags] == addresses
    for stage, args in enumerate(flags):
        options = worker_options(args, server["secret"])
        assert options.engine.model == "the/model"
        assert (options.stage, options.n_stages) == (stage, 3)
        assert options.data_host == f"10.0.0.{stage + 1}"
        assert options.engine.tensor_parallel == settings.engine.tensor_parallel

    directives = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", SCRIPT.read_text(), re.MULTILINE))
    signalled = re.fullmatch(r"B:TERM@(\d+)", directives["signal"])
    assert signalled and int(signalled[1]) > settings.endpoint.drain_timeout + 10
    assert int(directives["gpus-per-node"]) == settings.engine.tensor_parallel
    assert settings.engine.restarts.restarts == MAX_RESTARTS


def test_a_lost_worker_is_restarted_and_a_signal_drains(start: Start) -> None:
    job = start("the/model", **{"2": "1 137 0 2"})
    job.wait(lambda: len(job.events_of("started", "2")) == 5 and job.events_of("started", "server"))
    job.wait(lambda: job.events_of("started", "1") and job.events_of("started", "3"))
    assert not job.events_of("ended", "server")
    os.kill(job.process.pid, signal.SIGTERM)  # only the script, as scancel --batch does
    job.wait(lambda: job.events_of("ended", "server"))
    job.wait(lambda: all(job.events_of("ended", name) for name in "123"))
    status, _ = job.end()
    assert status == 0
    assert [len(job.events_of("started", name)) for name in ("server", "1", "3")] == [1, 1, 1]
    order = [_name(event) for event in job.events if event["event"] == "ended"]
    assert order[0] == "server"  # workers run until the drain is over
    assert list(job.home.iterdir()) == []  # the secret has been deleted


def test_a_usage_error_ends_the_job_at_once(start: Start) -> None:
    job = start("the/model", **{"1": "2"})
    status, output = job.end()
    assert status == 1
    assert "the worker of stage 1 on alpha ended with status 2" in output
    assert len(job.events_of("started", "1")) == 1
    assert list(job.home.iterdir()) == []


def test_a_worker_that_is_always_lost_ends_the_job(start: Start) -> None:
    job = start("the/model", **{"3": "1 " * 50})
    status, output = job.end()
    assert status == 1
    assert len(job.events_of("started", "3")) == 1 + MAX_RESTARTS
    assert output.count("the worker of stage 3 on gamma ended with status 1") == 1 + MAX_RESTARTS


def test_when_the_server_ends_the_job_ends_with_its_status(start: Start) -> None:
    job = start("the/model", server="2")
    status, _ = job.end()
    assert status == 2
    assert list(job.home.iterdir()) == []


def test_a_model_must_be_named(start: Start) -> None:
    status, output = start().end()
    assert status != 0
    assert "usage: sbatch" in output
