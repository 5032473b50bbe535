"""The cause of a loss by the ends of processes, and the kernel's count of OOM kills."""

from pathlib import Path

import pytest

from orca_jax.errors import LossCause
from orca_jax.workers.loss_cause import OomKills, ProcessState, cause_of_states

UNHARMED = ProcessState(None)
FAULT, MEMORY, OUTSIDE = LossCause.FAULT, LossCause.MEMORY, LossCause.OUTSIDE


@pytest.mark.parametrize("seen", [FAULT, LossCause.UNKNOWN])
def test_without_an_end_or_a_stop_the_cause_is_what_was_seen(seen: LossCause) -> None:
    states = [UNHARMED, ProcessState(-9, was_suspect=True)]
    assert cause_of_states(states, seen=seen, for_memory=True) is seen


@pytest.mark.parametrize(
    ("states", "cause"),
    [
        ([ProcessState(-9)], OUTSIDE),
        ([ProcessState(-15)], OUTSIDE),
        ([ProcessState(-64)], OUTSIDE),
        ([ProcessState(0)], OUTSIDE),
        ([ProcessState(-11)], FAULT),
        ([ProcessState(-6)], FAULT),
        ([ProcessState(1)], FAULT),
        ([ProcessState(1), ProcessState(-9)], OUTSIDE),  # the others of a job exit with it
        ([ProcessState(-11), ProcessState(1)], FAULT),
        ([ProcessState(None, was_stopped=True)], OUTSIDE),
        ([ProcessState(1), ProcessState(None, was_stopped=True)], OUTSIDE),
        ([ProcessState(-11), ProcessState(None, was_stopped=True)], FAULT),
        ([ProcessState(-9, was_suspect=True, was_stopped=True)], OUTSIDE),
    ],
)
def test_the_cause_by_ends(states: list[ProcessState], cause: LossCause) -> None:
    for order in (states, states[::-1]):
        assert cause_of_states([UNHARMED, *order], seen=FAULT, for_memory=False) is cause


def test_an_oom_kill_is_one_of_a_killed_process() -> None:
    assert cause_of_states([ProcessState(-9)], seen=FAULT, for_memory=True) is MEMORY
    assert cause_of_states([ProcessState(-15)], seen=FAULT, for_memory=True) is OUTSIDE
    assert cause_of_states([ProcessState(-11)], seen=FAULT, for_memory=True) is FAULT


EVENTS = "low 0\nhigh 7\noom 3\noom_kill {}\noom_group_kill 9\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
VMSTAT = "oom_kill {}\nnuma_hit 5\n"


@pytest.mark.parametrize(
    ("group", "file", "content"),
    [
        ("0::/pod/orca\n", "sys/fs/cgroup/pod/orca/memory.events", EVENTS),
        ("0::/not/visible\n", "sys/fs/cgroup/memory.events", EVENTS),
        ("9:cpu:/x\n4:memory:/x\n0::/\n", "sys/fs/cgroup/memory/x/memory.oom_control", CONTROL),
        ("4:cpu,memory:/x\n", "sys/fs/cgroup/memory/memory.oom_control", CONTROL),
        ("0::/\n", "proc/vmstat", VMSTAT),
        (None, "proc/vmstat", VMSTAT),
    ],
)
def test_oom_kills_are_counted(tmp_path: Path, group: str | None, file: str, content: str) -> None:
    path = tmp_path / file
    for place in (path, tmp_path / "proc/self/cgroup"):
        place.parent.mkdir(parents=True, exist_ok=True)
    if group is not None:
        (tmp_path / "proc/self/cgroup").write_text(group)
    if path.name != "vmstat":  # the whole machine's count says nothing here
        (tmp_path / "proc/vmstat").write_text(VMSTAT.format(99))
    path.write_text(content.format(2))
    kills = OomKills(tmp_path)
    assert not kills.rose()
    (tmp_path / "proc/vmstat").write_text(VMSTAT.format(100)) if path.name != "vmstat" else None
    assert not kills.rose()
    path.write_text(content.format(3))
    assert kills.rose() and kills.rose()
    kills.mark()
    assert not kills.rose()


def test_a_machine_without_a_count_has_no_oom_kills(tmp_path: Path) -> None:
    kills = OomKills(tmp_path)
    kills.mark()
    assert not kills.rose()
