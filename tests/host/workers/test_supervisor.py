"""The supervisor, with small real processes that die, hang, stop, flood and ignore orders."""

import os
import re
import select
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from orca_jax.config import RestartBound
from orca_jax.errors import EngineError, LossCause
from orca_jax.workers.supervisor import Supervisor, WorkerCommand
from tests.places import ROOT

STARTED = re.compile(r"process \(pid ([0-9]+)\) was started$")
SOON = 30.0  # seconds; what is waited for comes in milliseconds
WORKER = "import sys; print('up', flush=True); sys.stdin.buffer.read()"  # as a worker should be
STUBBORN = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('up', flush=True)
while True:
    signal.pause()
"""


class Clock:
    """The real time, which a test can stop and advance."""

    def __init__(self, stands_still: bool) -> None:
        self.added = 0.0
        self.n_looks = 0
        self._stands_still = stands_still

    def __call__(self) -> float:
        self.n_looks += 1
        return self.added + (0.0 if self._stands_still else time.monotonic())


class Workers:
    """A supervisor, and all its messages."""

    def __init__(
        self,
        *codes: str,
        bound: RestartBound | None = None,
        delay: float = 0.01,
        patience: float = 300.0,
        grace: float = 10.0,
        time_stands_still: bool = False,
    ) -> None:
        self.events: list[str] = []
        self.clock = Clock(time_stands_still)
        self._news = threading.Condition()
        commands = [WorkerCommand((sys.executable, "-c", code), dict(os.environ)) for code in codes]
        self.supervisor = Supervisor(
            commands,
            bound=bound or RestartBound(restarts=100),
            on_event=self.hear,
            clock=self.clock,
            delay_seconds=delay,
            patience_seconds=patience,
            grace_seconds=grace,
        )

    def hear(self, event: str) -> None:
        """Read the supervisor's messages."""
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def wait_for(self, event: str, times: int = 1) -> None:
        """Wait until this many events contain the text."""
        with self._news:
            assert self._news.wait_for(lambda: self.count(event) >= times, SOON), self.events

    def count(self, event: str) -> int:
        return sum(event in other for other in self.events)

    def pid(self, stage: int = 0) -> int:
        pid = self.supervisor.pids()[stage]
        assert pid is not None, self.events
        return pid

    def assert_untouched(self, stage: int, pid: int) -> None:
        """Check that nobody asked this process to end, by ending it with the test's signal."""
        assert self.pid(stage) == pid
        os.kill(pid, signal.SIGUSR1)
        self.wait_for(f"(pid {pid}) was ", times=2)  # started and ended
        assert self.count(f"(pid {pid}) was ended by SIGUSR1") == 1, self.events

    def wait_for_failure(self) -> EngineError:
        eventually(lambda: self.supervisor.failure() is not None)
        failure = self.supervisor.failure()
        assert failure is not None
        return failure


Start = Callable[..., Workers]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts workers; at the end closes them and checks that no thread or child is left."""
    threads = set(threading.enumerate())
    all_workers = list[Workers]()
    with ExitStack() as stack:

        def begin(*codes: str, **settings: object) -> Workers:
            workers = Workers(*codes, **settings)  # type: ignore[arg-type]
            all_workers.append(workers)
            stack.callback(workers.supervisor.close)
            workers.supervisor.start()
            return workers

        yield begin
    assert set(threading.enumerate()) <= threads
    for workers in all_workers:
        assert_reaped(workers.events)


def eventually(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_reaped(events: list[str]) -> None:
    """Assert that all started processes are gone, and none is a zombie of ours."""
    pids = [int(match[1]) for event in events if (match := STARTED.search(event))]
    assert pids
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def is_gone(pid: int) -> bool:
    """Whether there is no such process, or only a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")


# Starts and ends.


def test_every_stage_is_started_and_close_leaves_nothing(start: Start) -> None:
    workers = start(WORKER, WORKER)
    workers.wait_for("stage 1: up")
    workers.wait_for("stage 2: up")
    pids = [workers.pid(0), workers.pid(1)]
    assert len(set(pids)) == 2
    assert [os.getsid(pid) for pid in pids] == pids  # Ctrl-C goes to the session of the terminal
    for stage, pid in enumerate(pids, 1):
        assert f"stage {stage}: its process (pid {pid}) was started" in workers.events
    assert workers.supervisor.failure() is None
    workers.supervisor.close()
    assert all(is_gone(pid) for pid in pids)
    assert workers.supervisor.pids() == [None, None]
    n_events = len(workers.events)
    workers.supervisor.close()
    assert len(workers.events) == n_events


def test_argv_and_environment_are_the_commands_own() -> None:
    heard = Workers()
    code = "import os, sys; print(sys.argv[1:], os.environ['SECRET'], 'PATH' in os.environ, flush=True)"
    command = WorkerCommand((sys.executable, "-c", f"{code}; {WORKER}", "--stage", "1"), {"SECRET": "hush"})
    supervisor = Supervisor([command], bound=RestartBound(restarts=0), on_event=heard.hear)
    try:
        supervisor.start()
        heard.wait_for("stage 1: ['--stage', '1'] hush False")
    finally:
        supervisor.close()
    assert "hush" not in repr(command)


def test_the_end_of_stdin_comes_with_close_and_not_before(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "end"
    code = f"""
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('up', flush=True)
assert sys.stdin.buffer.read() == b''
open({str(file)!r}, 'w').close()
"""
    workers = start(code, WORKER)  # the other has not inherited this one's pipe
    workers.wait_for("stage 1: up")
    assert not file.exists()
    workers.supervisor.close()
    assert file.exists()
    assert workers.count("SIGKILL") == 0


def test_what_the_server_holds_open_is_not_inherited(start: Start) -> None:
    reads, writes = os.pipe()
    try:
        os.set_inheritable(writes, True)
        workers = start(WORKER)
        workers.wait_for("stage 1: up")
    finally:
        os.close(writes)
    with open(reads, "rb") as pipe:
        assert select.select([pipe], [], [], SOON)[0]
        assert pipe.read() == b""
    assert not is_gone(workers.pid())


def test_workers_do_not_outlive_a_server_that_was_killed(start: Start) -> None:
    server = f"""
import sys, threading
sys.path.insert(0, {str(ROOT)!r})
from orca_jax.config import RestartBound
from orca_jax.workers.supervisor import WorkerCommand
from orca_jax.workers.supervisor import Supervisor
commands = [WorkerCommand((sys.executable, '-c', {WORKER!r}), {{}})] * 2
up = threading.Semaphore(0)
hear = lambda event: event.endswith(': up') and up.release()
supervisor = Supervisor(commands, bound=RestartBound(), on_event=hear)
supervisor.start()
assert up.acquire(timeout={SOON}) and up.acquire(timeout={SOON})
print('workers', *supervisor.pids(), flush=True)
threading.Event().wait(10 * {SOON})
"""
    servers = start(server, bound=RestartBound(restarts=0))
    servers.wait_for("stage 1: workers ")
    (line,) = [event for event in servers.events if "workers " in event]
    pids = [int(word) for word in line.split()[3:]]
    assert len(pids) == 2 and not any(is_gone(pid) for pid in pids)
    os.kill(servers.pid(), signal.SIGKILL)
    eventually(lambda: all(is_gone(pid) for pid in pids))


def test_close_kills_processes_that_ignore_sigterm_or_are_stopped(start: Start) -> None:
    workers = start(STUBBORN, STUBBORN, WORKER, grace=0.2)
    for stage in (1, 2, 3):
        workers.wait_for(f"stage {stage}: up")
    pids = [workers.pid(stage) for stage in range(3)]
    stop(pids[1])
    stop(pids[2])
    workers.supervisor.close()
    assert all(is_gone(pid) for pid in pids)
    assert f"stage 1: its process (pid {pids[0]}) was ended by SIGKILL" in workers.events
    assert f"stage 2: its process (pid {pids[1]}) was ended by SIGKILL" in workers.events
    assert workers.count(f"stage 3: its process (pid {pids[2]}) was ended by SIGKILL") == 0


def test_processes_that_a_worker_left_running_end_with_it(start: Start) -> None:
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print('child', child.pid, flush=True)
sys.stdin.read()
"""
    workers = start(code)
    workers.wait_for("stage 1: child ")
    children = [int(event.split()[-1]) for event in workers.events if "child " in event]
    os.kill(workers.pid(), signal.SIGKILL)
    eventually(lambda: is_gone(children[0]))


@pytest.mark.parametrize("then", ["signal.pause()", "while True: os.write(1, b'x' * 4096)"])
def test_close_does_not_wait_for_a_process_that_holds_the_stderr_pipe(start: Start, then: str) -> None:
    code = f"""
import os, signal, sys
if os.fork() == 0:
    os.setsid()
    signal.alarm(600)
    print('child', os.getpid(), flush=True)
    {then}
sys.stdin.read()
"""
    workers = start(code)
    workers.wait_for("stage 1: child ")
    child = int(next(event for event in workers.events if "child " in event).split()[-1])
    try:
        workers.supervisor.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "orca-worker-stderr"]
        assert "pause" not in then or not is_gone(child)  # or this would test nothing
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_a_start_that_fails_half_way_ends_the_started_processes() -> None:
    events = list[str]()
    commands = [
        WorkerCommand((sys.executable, "-c", WORKER), {}),
        WorkerCommand(("/nowhere/python",), {}),
    ]
    supervisor = Supervisor(commands, bound=RestartBound(), on_event=events.append)
    with pytest.raises(EngineError, match=r"^stage 2: its process cannot be started: .*/nowhere/python"):
        supervisor.start()
    assert supervisor.pids() == [None, None]
    assert_reaped(events)
    assert not [event for event in events if "restarting it" in event]


def test_close_before_start() -> None:
    Workers(WORKER).supervisor.close()


# Lost processes.


@pytest.mark.parametrize("joined", [False, True])
def test_a_killed_process_is_started_again_and_the_others_stay(start: Start, joined: bool) -> None:
    workers = start(WORKER, WORKER)
    first, other = workers.pid(0), workers.pid(1)
    if joined:
        workers.supervisor.joined(0)
    os.kill(first, signal.SIGKILL)
    workers.wait_for("stage 1: its process", times=3)
    assert f"stage 1: its process (pid {first}) was ended by SIGKILL; restarting it" in workers.events
    assert workers.pid(0) != first and not is_gone(workers.pid(0))
    assert workers.pid(1) == other
    assert workers.supervisor.failure() is None


@pytest.mark.parametrize("status", [0, 1, 3])
def test_a_process_that_exits_is_started_again(start: Start, status: int) -> None:
    workers = start(f"raise SystemExit({status})")
    workers.wait_for(f"ended with status {status}; restarting it", times=3)


def test_pauses_double_until_a_process_joins(start: Start) -> None:
    workers = start(WORKER, delay=4.0, time_stands_still=True)
    pauses = list[int]()
    for n_before, joins in enumerate((False, False, False, True)):
        if joins:
            workers.supervisor.joined(0)
        os.kill(workers.pid(), signal.SIGKILL)
        workers.wait_for("restarting it", times=n_before + 1)
        assert workers.supervisor.pids() == [None]
        pauses.append(0)
        while workers.supervisor.pids() == [None]:
            pauses[-1] += 1
            workers.clock.added += 1.0
            enough = workers.clock.n_looks + 4  # an old look, a new one that starts it, and its start are 3
            eventually(lambda n=enough: workers.clock.n_looks >= n or workers.supervisor.pids() != [None])
    assert pauses == [4, 8, 10, 4]


def test_status_2_before_it_joined_is_a_mistake_and_not_tried_again(start: Start) -> None:
    code = """
import sys
print('loading', file=sys.stderr)
print('orca: error: no checkpoint at /x', file=sys.stderr)
print('a library says good-bye', file=sys.stderr)
sys.exit(2)
"""
    workers = start(WORKER, code)
    failure = workers.wait_for_failure()
    assert str(failure) == "stage 2: no checkpoint at /x"
    assert failure.__notes__ == [
        "its last lines of output:\nloading\norca: error: no checkpoint at /x\na library says good-bye"
    ]
    assert workers.count("stage 2: its process") == 2  # its start and its end
    assert workers.count("restarting it") == 0
    assert workers.supervisor.pids() == [workers.pid(0), None]
    os.kill(workers.pid(0), signal.SIGKILL)
    workers.wait_for("stage 1: its process", times=2)
    assert workers.supervisor.failure() is failure
    assert workers.count("restarting it") == 0


def test_a_process_that_waits_for_its_start_is_not_started_after_a_failure(start: Start) -> None:
    mistaken = f"import signal; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(2)); {WORKER}"
    workers = start(WORKER, mistaken, WORKER, delay=100.0)
    workers.wait_for("stage 2: up")
    os.kill(workers.pid(0), signal.SIGKILL)
    workers.wait_for("stage 1: its process", times=2)
    os.kill(workers.pid(1), signal.SIGUSR1)
    workers.wait_for_failure()
    workers.clock.added += 1000.0
    workers.assert_untouched(2, workers.pid(2))  # seen by a look after the clock went on
    assert workers.supervisor.pids() == [None, None, None]


def test_status_2_without_a_word(start: Start) -> None:
    failure = start("raise SystemExit(2)").wait_for_failure()
    message = str(failure)
    assert message.startswith("stage 1: its process (pid ") and message.endswith(") ended with status 2")


def test_status_2_after_it_joined_is_a_loss_like_others(start: Start) -> None:
    workers = start(f"import signal; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(2)); {WORKER}")
    workers.wait_for("stage 1: up")
    workers.supervisor.joined(0)
    os.kill(workers.pid(), signal.SIGUSR1)
    workers.wait_for("ended with status 2; restarting it")
    workers.wait_for("stage 1: up", times=2)
    os.kill(workers.pid(), signal.SIGUSR1)  # the new one has not joined
    assert "ended with status 2" in str(workers.wait_for_failure())


def test_more_losses_than_the_bound_allows(start: Start) -> None:
    code = "import sys; print('first', file=sys.stderr); print('out of memory', file=sys.stderr); sys.exit(7)"
    workers = start(WORKER, code, bound=RestartBound(restarts=2, seconds=1000.0))
    message = str(workers.wait_for_failure())
    assert message.startswith("stage 2: its process (pid ")
    assert message.endswith(
        ") ended with status 7; workers were restarted 2 times within 1000 seconds, and 2 are allowed; "
        "its last line of output: out of memory"
    )
    assert workers.count("stage 2: out of memory") == 3
    assert workers.count("restarting it") == 2
    workers.supervisor.joined(0)
    workers.supervisor.restart(0)
    workers.assert_untouched(0, workers.pid(0))


def test_the_bound_counts_all_stages_and_how_a_process_was_killed(start: Start) -> None:
    workers = start(WORKER, WORKER, bound=RestartBound(restarts=1))
    os.kill(workers.pid(0), signal.SIGTERM)
    workers.wait_for("SIGTERM; restarting it")
    os.kill(workers.pid(1), signal.SIGKILL)
    message = str(workers.wait_for_failure())
    assert message.startswith("stage 2: its process (pid ") and ") was ended by SIGKILL; workers" in message


def test_processes_that_had_joined_do_not_count(start: Start) -> None:
    """The engine master counts these: all losses by one request are one."""
    workers = start(WORKER, bound=RestartBound(restarts=0))
    for n_losses in (1, 2, 3):
        workers.supervisor.joined(0)
        os.kill(workers.pid(), signal.SIGKILL)
        workers.wait_for("restarting it", times=n_losses)
        workers.wait_for("was started", times=n_losses + 1)
    assert workers.supervisor.failure() is None
    os.kill(workers.pid(), signal.SIGKILL)
    assert "restarted 0 times" in str(workers.wait_for_failure())


def test_losses_of_long_ago_do_not_count(start: Start) -> None:
    workers = start(WORKER, bound=RestartBound(restarts=1, seconds=1000.0))
    for n_losses in (1, 2, 3):
        os.kill(workers.pid(), signal.SIGKILL)
        workers.wait_for("restarting it", times=n_losses)
        workers.wait_for("was started", times=n_losses + 1)
        workers.clock.added += 1001.0
    assert workers.supervisor.failure() is None


# What the engine master asks for.


def test_restart_of_a_joined_process_that_is_stopped(start: Start) -> None:
    workers = start(STUBBORN, WORKER, grace=0.2)
    workers.wait_for("stage 1: up")
    first, other = workers.pid(0), workers.pid(1)
    workers.supervisor.joined(0)
    stop(first)
    workers.supervisor.restart(0)
    workers.wait_for("stage 1: up", times=2)
    given_up = f"stage 1: its process (pid {first}) was suspect and was ended by SIGKILL; restarting it"
    assert given_up in workers.events
    assert is_gone(first)
    second = workers.pid(0)
    assert second != first and workers.pid(1) == other
    workers.assert_untouched(0, second)


def test_a_process_that_has_not_joined_yet_is_left_in_peace(start: Start) -> None:
    workers = start(WORKER, patience=300.0)
    first = workers.pid()
    workers.clock.added = 250.0
    workers.supervisor.restart(0)
    workers.assert_untouched(0, first)


def test_a_process_that_never_joins_is_given_up_in_the_end(start: Start) -> None:
    workers = start(WORKER, patience=300.0)
    first = workers.pid()
    workers.clock.added = 301.0
    workers.supervisor.restart(0)
    workers.wait_for("was started", times=2)
    assert is_gone(first)


def test_restart_does_not_hit_the_replacement_process(start: Start) -> None:
    workers = start(WORKER)
    workers.supervisor.joined(0)
    os.kill(workers.pid(), signal.SIGKILL)
    workers.wait_for("restarting it")
    workers.supervisor.restart(0)  # there is none, or a new one
    workers.wait_for("stage 1: up", times=1)
    workers.wait_for("was started", times=2)
    second = workers.pid()
    for _ in range(3):
        workers.supervisor.restart(0)
    workers.assert_untouched(0, second)


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGKILL, LossCause.OUTSIDE),
        (signal.SIGTERM, LossCause.OUTSIDE),
        (signal.SIGHUP, LossCause.OUTSIDE),
        (signal.SIGSEGV, LossCause.FAULT),
        (signal.SIGABRT, LossCause.FAULT),
        (signal.SIGBUS, LossCause.FAULT),
    ],
)
@pytest.mark.parametrize("seen", [LossCause.UNKNOWN, LossCause.FAULT])
def test_the_cause_of_a_loss_is_how_a_process_ended(
    start: Start, number: signal.Signals, cause: LossCause, seen: LossCause
) -> None:
    """This holds even if another stage's line broke, or none."""
    workers = start(WORKER, WORKER)
    for stage in (0, 1):
        workers.wait_for(f"stage {stage + 1}: up")
        workers.supervisor.joined(stage)
    pid = workers.pid(0)
    os.kill(pid, number)
    if seen is LossCause.UNKNOWN:
        assert workers.supervisor.cause_of(0, seen) is cause
    workers.wait_for(f"(pid {pid}) was ended by {number.name}")
    assert workers.supervisor.cause_of(1, LossCause.FAULT) is cause
    workers.wait_for("stage 1: up", times=2)
    workers.supervisor.joined(0)
    assert workers.supervisor.cause_of(1, LossCause.FAULT) is LossCause.FAULT, "in the epoch after it"


@pytest.mark.parametrize(("status", "cause"), [(0, LossCause.OUTSIDE), (1, LossCause.FAULT)])
def test_a_worker_that_was_asked_to_end_is_no_fault(start: Start, status: int, cause: LossCause) -> None:
    workers = start(f"import sys; sys.stdin.buffer.read(1); raise SystemExit({status})", delay=300.0)
    workers.supervisor.joined(0)
    assert workers.supervisor.cause_of(0, LossCause.FAULT) is LossCause.FAULT
    process = workers.supervisor._stages[0].process
    assert process is not None
    process.stdin.write(b"x")
    assert workers.supervisor.cause_of(0, LossCause.UNKNOWN) is cause


def test_a_worker_that_was_stopped_for_a_while_is_no_fault(start: Start) -> None:
    workers = start(WORKER, WORKER)
    workers.wait_for("stage 1: up")
    workers.supervisor.joined(0)
    workers.supervisor.joined(1)
    pid = workers.pid(0)
    assert workers.supervisor.cause_of(1, LossCause.FAULT) is LossCause.FAULT
    stop(pid)
    assert workers.supervisor.cause_of(1, LossCause.FAULT) is LossCause.OUTSIDE
    os.kill(pid, signal.SIGCONT)
    assert workers.supervisor.cause_of(1, LossCause.FAULT) is LossCause.OUTSIDE
    workers.supervisor.restart(0)
    workers.wait_for("was suspect and was ended by SIGKILL")
    assert workers.supervisor.cause_of(1, LossCause.FAULT) is LossCause.OUTSIDE
    workers.wait_for("stage 1: up", times=2)
    workers.supervisor.joined(0)
    assert workers.supervisor.cause_of(1, LossCause.FAULT) is LossCause.FAULT


def test_a_suspect_that_the_supervisor_killed_was_not_killed_from_outside(start: Start) -> None:
    workers = start(WORKER)
    workers.wait_for("stage 1: up")
    workers.supervisor.joined(0)
    workers.supervisor.restart(0)
    workers.wait_for("was suspect and was ended by SIGKILL")
    assert workers.supervisor.cause_of(0, LossCause.FAULT) is LossCause.FAULT


def test_supervisors_do_not_disturb_each_other(start: Start) -> None:
    one = start(WORKER)
    other = start(WORKER)
    other.wait_for("stage 1: up")
    pid = other.pid()
    one.supervisor.close()
    assert not is_gone(pid)
    os.kill(pid, signal.SIGKILL)
    other.wait_for("was started", times=2)
    assert one.supervisor.pids() == [None]
    assert one.count(str(pid)) == 0


# What processes say.


def test_stdout_and_stderr_are_passed_on_line_by_line(start: Start) -> None:
    code = r"""
import sys
sys.stdout.write('one\ntwo\n\n'); sys.stdout.flush()
sys.stderr.buffer.write(b'three \xff\r\n' + b'y' * 2000 + b'\n' + b'z' * 2001 + b'\nlast'); sys.stderr.flush()
sys.exit(2)
"""
    workers = start(code)
    failure = workers.wait_for_failure()
    messages = [event.removeprefix("stage 1: ") for event in workers.events if "its process" not in event]
    assert messages == [
        "one",
        "two",
        "three \N{REPLACEMENT CHARACTER}",
        "y" * 2000,
        "z" * 2000 + "...",
        "last",
    ]
    assert str(failure).endswith(" ended with status 2; its last line of output: last")


def test_the_last_words_are_waited_for() -> None:
    def slow(event: str) -> None:
        if event == "stage 1: first":
            eventually(lambda: supervisor.pids() == [None])

    command = WorkerCommand((sys.executable, "-c", "print('first'); print('last'); raise SystemExit(7)"), {})
    supervisor = Supervisor([command], bound=RestartBound(restarts=0), on_event=slow)
    try:
        supervisor.start()
        eventually(supervisor.failure)
        assert str(supervisor.failure()).endswith("; its last line of output: last")
    finally:
        supervisor.close()


def test_only_the_last_lines_are_kept(start: Start) -> None:
    workers = start("for n in range(1000): print('line', n)\nraise SystemExit(2)")
    failure = workers.wait_for_failure()
    assert workers.count("stage 1: line") == 1000
    kept = failure.__notes__[0].splitlines()
    assert kept == ["its last lines of output:", *(f"line {n}" for n in range(980, 1000))]


def test_a_flood_without_a_newline_does_not_block_and_is_not_kept(start: Start) -> None:
    code = (
        "import os\nfor _ in range(512): os.write(2, b'x' * 65536)\nos.write(2, b'\\ndone\\n'); os._exit(2)"
    )
    tracemalloc.start()
    try:
        workers = start(code)
        failure = workers.wait_for_failure()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(failure).endswith("; its last line of output: done")
    assert "stage 1: " + "x" * 2000 + "..." in workers.events
    assert most < 2 << 20  # of 32 MiB


def test_an_on_event_that_raises_stops_nothing() -> None:
    up = threading.Semaphore(0)

    def raises(event: str) -> None:
        if event.endswith(": up"):
            up.release()
        raise BrokenPipeError

    command = WorkerCommand((sys.executable, "-c", WORKER), {})
    supervisor = Supervisor([command], bound=RestartBound(), on_event=raises, delay_seconds=0.01)
    try:
        supervisor.start()
        assert up.acquire(timeout=SOON)
        (pid,) = supervisor.pids()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert up.acquire(timeout=SOON)
    finally:
        supervisor.close()
    assert supervisor.failure() is None
