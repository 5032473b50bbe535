"""Child processes that exchange JSON: real ones that answer, stay silent, flood, end, and leave others."""

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from orca_jax.workers import json_child
from orca_jax.workers.json_child import LIMIT_LINES, ChildSilent, JsonChild, LineQueue

SOON = 30.0  # seconds; what is waited for comes in milliseconds
ECHO = """
import json, sys
print("noise", flush=True)
print("[1]", flush=True)
for line in sys.stdin:
    print(json.dumps({"echo": json.loads(line)}), flush=True)
print("the end", file=sys.stderr, flush=True)
sys.exit(3)
"""


def child(code: str, **options: Any) -> JsonChild:
    """Start a process that runs this program."""
    return JsonChild([sys.executable, "-c", code], **options)


def is_there(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: Sequence[int]) -> None:
    """Fails after some seconds."""
    deadline = time.monotonic() + SOON
    while any(map(is_there, pids)):
        assert time.monotonic() < deadline, f"{pids} are still there"
        time.sleep(0.01)


def test_questions_and_answers() -> None:
    others: list[str] = []
    long = {"text": "x" * 1_000_000}  # more than a pipe holds
    with child(ECHO, on_other=others.append) as echo:
        assert echo.ask({"a": 1}, SOON) == {"echo": {"a": 1}}
        assert echo.ask(long, SOON) == {"echo": long}
        assert others == ["noise", "[1]"]
        assert echo.ask({"b": None}, SOON, last=True) == {"echo": {"b": None}}
        assert echo.receive(SOON) is None and echo.receive(SOON) is None
        assert echo.wait(SOON) == 3
        assert echo.last_words() == "the end\n"
        assert echo.ask({"late": 1}, SOON) is None


def test_silence_ends_at_its_deadline_and_so_does_the_process() -> None:
    with child("import os, time; print('{}', flush=True); time.sleep(600)") as silent:
        assert silent.ask({"text": "x" * 1_000_000}, SOON) == {}
        start = time.monotonic()
        with pytest.raises(ChildSilent, match=r"no answer within 0\.2 seconds"):
            silent.receive(0.2)
        assert silent.wait(SOON) == -signal.SIGKILL
        assert time.monotonic() - start < SOON / 2


def test_noise_does_not_put_the_deadline_off() -> None:
    code = "import time\nwhile True:\n    print('noise', flush=True)\n    time.sleep(0.01)"
    with child(code) as noisy, pytest.raises(ChildSilent):
        noisy.receive(0.3)


def test_close_gives_time_to_end_in_order_and_no_more(tmp_path: Path) -> None:
    done = tmp_path / "done"
    orderly = "import sys, time\nprint('{}', flush=True)\nsys.stdin.read()\ntime.sleep(0.2)\n"
    with child(f"{orderly}open({str(done)!r}, 'x')", grace_seconds=SOON) as polite:
        assert polite.receive(SOON) == {}
        assert not done.exists()
    assert done.exists() and polite.wait(0.0) == 0
    stubborn = child("import time; print('{}', flush=True); time.sleep(600)", grace_seconds=0.1)
    stubborn.receive(SOON)
    start = time.monotonic()
    stubborn.close()
    assert time.monotonic() - start < SOON / 2
    assert stubborn.wait(0.0) == -signal.SIGKILL
    stubborn.close()


def test_its_own_child_processes_end_with_it() -> None:
    code = """
import json, subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps({"pid": left.pid}), flush=True)
"""
    with child(code) as parent:
        answer = parent.receive(SOON)
        assert answer is not None
        pid = answer["pid"]
        assert parent.wait(SOON) == 0
    with suppress(ProcessLookupError):
        wait_until_gone([pid])
    assert not is_there(pid)


def test_where_it_runs_and_with_which_variables(tmp_path: Path) -> None:
    code = (
        "import json, os; print(json.dumps({'at': os.getcwd(), 'x': os.environ['X'], 'n': len(os.environ)}))"
    )
    variables = {"X": "1", "PATH": os.environ["PATH"]}
    with child(code, folder=tmp_path, environment=variables) as process:
        answer = process.receive(SOON)
    assert answer is not None
    assert (answer["at"], answer["x"]) == (str(tmp_path), "1") and answer["n"] < len(os.environ)


def test_a_child_that_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        JsonChild([str(tmp_path / "nothing")])


def wait_until_full(lines: LineQueue) -> None:
    """Fails after some seconds."""
    deadline = time.monotonic() + SOON
    while len(lines._lines) < LIMIT_LINES:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(lines._lines) == LIMIT_LINES


def test_a_child_that_writes_more_than_is_read_waits_and_still_ends() -> None:
    n = 4 * LIMIT_LINES
    code = f"for i in range({n}): print('{{}}' if i % 2 else 'x' * 200)\n"
    others: list[str] = []
    with child(code, on_other=others.append) as flood:
        wait_until_full(flood._lines)
        for _ in range(n // 2):
            assert flood.receive(SOON) == {}
        assert flood.receive(SOON) is None
        assert len(others) == n // 2 and flood.wait(SOON) == 0
    with child(code) as flood:
        assert flood.wait(SOON) == 0, "its end does not wait for a reader"
    with child(code + "import time; time.sleep(600)", grace_seconds=0.1) as flood:
        assert flood.receive(SOON) == {}


def test_a_line_too_long_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_child, "LIMIT_BYTES", 1000)
    with child("import time; print('{}'); print('x' * 1001, flush=True); time.sleep(600)") as long:
        assert long.receive(SOON) == {}
        with pytest.raises(ChildSilent, match="a line of its output has more than 1000 bytes"):
            long.receive(SOON)
        assert long.wait(SOON) == -signal.SIGKILL


def is_blocked(lines: LineQueue, line: bytes) -> threading.Thread:
    """Start a thread that puts this line; check that it blocks."""
    writer = threading.Thread(target=lines.put, args=(line,), daemon=True)
    writer.start()
    writer.join(0.1)
    assert writer.is_alive()
    return writer


def test_lines_come_in_order_and_then_the_end() -> None:
    lines = LineQueue()
    lines.put(b"a\n")
    lines.put(b"b\n")
    lines.end()
    assert [lines.get(SOON), lines.get(SOON), lines.get(SOON), lines.get(0.0)] == [b"a\n", b"b\n", None, None]


def test_get_waits_no_longer_than_its_timeout() -> None:
    with pytest.raises(TimeoutError):
        LineQueue().get(0.01)


@pytest.mark.parametrize(("limit", "limit_bytes"), [(2, 1000), (1000, 6)])
def test_a_full_queue_blocks_its_writer_until_a_line_is_read(limit: int, limit_bytes: int) -> None:
    lines = LineQueue(limit=limit, limit_bytes=limit_bytes)
    lines.put(b"abc")
    lines.put(b"def")
    writer = is_blocked(lines, b"ghi")
    assert lines.get(SOON) == b"abc"
    writer.join(SOON)
    assert [lines.get(SOON), lines.get(SOON)] == [b"def", b"ghi"]


def test_an_empty_queue_takes_a_line_above_its_limit() -> None:
    lines = LineQueue(limit_bytes=2)
    lines.put(b"abc")
    assert lines.get(SOON) == b"abc"


def test_overflow_is_dropped_where_it_is_not_wanted() -> None:
    lines = LineQueue(limit=1)
    lines.put(b"kept")
    writer = is_blocked(lines, b"dropped")
    lines.discard_overflow()
    writer.join(SOON)
    lines.put(b"dropped too")
    lines.end()
    assert [lines.get(SOON), lines.get(SOON)] == [b"kept", None]


def test_a_yielding_child_has_a_low_priority() -> None:
    with child(ECHO, yields=True) as other, child(ECHO) as usual:
        assert other.ask({"a": 1}, SOON) == usual.ask({"a": 1}, SOON) == {"echo": {"a": 1}}
        priorities = [os.getpriority(os.PRIO_PROCESS, each.pid) for each in (other, usual)]
        assert priorities[0] > priorities[1] == os.getpriority(os.PRIO_PROCESS, 0)


def test_a_killed_child_is_seen_by_the_thread_that_waits_for_it() -> None:
    with child(ECHO) as other:
        timer = threading.Timer(0.0, other.kill)
        timer.start()
        assert other.receive(SOON) is None
        assert other.wait(SOON) == -signal.SIGKILL
        timer.join(SOON)
