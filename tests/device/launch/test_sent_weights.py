"""Temporary directories of weights on their way to workers: whose process is gone, those are removed."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from orca_jax.launch.remote_memory import _Files

KILLED = """
import os, signal
from orca_jax.launch.remote_memory import _Files
files = _Files()
(files.directory / "weights").mkdir()
print(files.directory, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "orca-sent-weights-link").symlink_to(tmp_path)
    (tmp_path / "another").mkdir()
    here = _Files()
    process = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False)
    left = Path(process.stdout.strip())
    assert left.parent == tmp_path and left.is_dir() and here.directory.is_dir()
    later = _Files()
    assert not left.exists()
    assert here.directory.is_dir() and later.directory.is_dir() and (tmp_path / "another").is_dir()
    later.remove()
    assert not later.directory.exists()
    del here
    assert {path.name for path in tmp_path.iterdir()} == {"another", "orca-sent-weights-link"}
