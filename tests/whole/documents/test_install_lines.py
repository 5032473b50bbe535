"""Each installation line of the documents, as it stands, in fresh environments in a copy of the repository.

pip finds and resolves everything, builds this package, and stops short of installing, which for CUDA's
libraries alone would take gigabytes.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.install_lines import install_lines
from tests.whole.documents.commands import copy_repository

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

COMMANDS = sorted({line.command for line in install_lines()})
_ENVIRONMENT = re.compile(r"(\S+)/bin/pip")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    copy_repository(folder)
    environments = {match[1] for command in COMMANDS for match in _ENVIRONMENT.finditer(command)}
    for name in environments:
        subprocess.run([sys.executable, "-m", "venv", name], cwd=folder, check=True)
    wheel = [".venv/bin/pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", "."]
    subprocess.run(wheel, cwd=folder, check=True)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_pip_can_do_what_it_says(command: str, clone: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{command} --dry-run"], cwd=clone, capture_output=True, text=True, timeout=1700
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Would install" in done.stdout
    if "-e '.[" in command or "*.whl" in command:
        assert "orca_jax-" in done.stdout
