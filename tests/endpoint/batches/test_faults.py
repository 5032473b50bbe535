"""The store while system calls fail or kill the server: each line has one answer, and nothing is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import ROOT

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("library") / "failing_calls.so"
    words = [
        "cc",
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-Werror",
        "-o",
        made,
        HERE / "failing_calls.c",
        "-ldl",
    ]
    subprocess.run([str(word) for word in words], check=True, timeout=120)
    return made


def play(library: Path, first: int, n_seeds: int) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.endpoint.batches.store_under_faults", library, first, n_seeds]
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1200,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes: dict[str, int] = json.loads(done.stdout)
    assert sum(outcomes.values()) == n_seeds
    return outcomes


def test_a_few_seeds(library: Path) -> None:
    outcomes = play(library, 0, 25)
    assert outcomes["killed"] > 4 and outcomes["failed"] > 4


@pytest.mark.long
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("first", range(0, 2000, 250))
def test_thousands_of_seeds_lose_nothing(library: Path, first: int) -> None:
    play(library, first, 250)
