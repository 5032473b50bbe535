"""Runs the shell commands of documents in a folder where their paths exist."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orca_jax.model_files.found_model import DEMO_MODEL
from tests.places import ROOT

LISTENING = re.compile(r"^loading; (\S+)/ready ", re.MULTILINE)
READY = re.compile(r"^ready; ", re.MULTILINE)
# Documents call a checkpoint by these names; here each is the demo model.
_CHECKPOINTS = ("path/to/checkpoint", "checkpoint", "MODEL", "PATH")


def copy_repository(folder: Path) -> None:
    """Copy the files that git knows, or is to know, to a folder."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.strip("\0").split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)  # as new: make compares times


def prepare(folder: Path) -> None:
    """Make the paths that commands name, and an environment at `.venv`."""
    (folder / ".venv").symlink_to(sys.prefix)
    for name in _CHECKPOINTS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(DEMO_MODEL)
    (folder / "prompts.jsonl").write_text(
        '{"prompt": "In the beginning", "max_tokens": 4}\n', encoding="utf-8"
    )
    (folder / "keys.txt").write_text("a-key-of-the-documents\n", encoding="utf-8")


def variables(code: Path) -> dict[str, str]:
    """The environment: a checkout's code, the installed `orca`, free ports unless a flag names one."""
    path = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    ports = {"ORCA_PORT": "0", "ORCA_GRPC_PORT": "0"}
    wide = {"COLUMNS": "130"}  # tables as in the documents
    return {**os.environ, "PATH": path, "PYTHONPATH": str(code), **ports, **wide}


def run(
    command: list[str] | str, folder: Path, *, code: Path = ROOT, seconds: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run a command's words, or a line in a shell, to its end."""
    return subprocess.run(
        command,
        shell=isinstance(command, str),
        cwd=folder,
        env=variables(code),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


@contextmanager
def serving(command: list[str], folder: Path, *, code: Path = ROOT, seconds: float = 300.0) -> Iterator[str]:
    """Run a server's command until the block ends; gives its URL once it is ready. It must end well."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables(code),
            stdin=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield _ready(process, log.fileno(), seconds)
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C on a terminal, `make` and all
            process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


def _ready(process: subprocess.Popen[bytes], log: int, seconds: float) -> str:
    """The server's URL, once it is ready."""
    deadline = time.monotonic() + seconds
    while True:
        written = os.pread(log, 1 << 20, 0).decode(errors="replace")
        listening = LISTENING.search(written)
        if listening and READY.search(written):
            return listening[1]
        assert process.poll() is None and time.monotonic() < deadline, written
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
