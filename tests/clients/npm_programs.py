"""Programs of the npm index, run in an environment from which only loopback can be reached."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

# Where `make test-clients` installed package.json.
FOLDER = Path(os.environ.get("CLIENTS_NPM", "")).resolve()
NOWHERE = "http://127.0.0.1:9"  # a proxy that nothing listens as


def program(name: str) -> str:
    """The path of a program. Skips the test where npm has not installed it."""
    path = FOLDER / "node_modules" / ".bin" / name
    if "CLIENTS_NPM" not in os.environ or not path.exists():
        pytest.skip("npm is missing or reached no registry when `make test-clients` installed its programs")
    return str(path)


def run(
    command: Sequence[str], folder: Path, home: Path, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program with a home folder of its own to its end; fail unless its exit status is 0."""
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE)
    proxies |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        command,
        cwd=folder,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "TMPDIR": str(home),
            **proxies,
            **(variables or {}),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def node() -> str:
    """The path of node. Skips the test where npm has installed nothing."""
    program("claude")  # one for all
    path = shutil.which("node")
    assert path is not None
    return path
