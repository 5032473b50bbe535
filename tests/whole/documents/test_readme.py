"""The README's commands, in a fresh copy of the repository with an environment that is there already."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import Block, blocks
from tests.whole.documents.commands import copy_repository, run, serving

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

# Where the README's server is; here it is on a free port.
ADDRESS = "http://127.0.0.1:8000"
# What the targets ask for, in the order in which they are made.
STAMPS = (".pip", ".package", ".dev")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git knows, or is to know, and `.venv` with this environment's programs."""
    folder = tmp_path_factory.mktemp("copy")
    copy_repository(folder)
    venv = folder / ".venv"
    venv.mkdir()
    (venv / "bin").symlink_to(Path(sys.prefix) / "bin")
    for stamp in STAMPS:
        (venv / stamp).touch()
    return folder


@pytest.fixture(scope="module")
def url(copy: Path) -> Iterator[str]:
    with serving(["make", "serve"], copy, code=copy, seconds=240) as url:
        yield url


def test_make_demo_writes_text(copy: Path) -> None:
    done = run(["make", "demo"], copy, code=copy, seconds=240)
    assert done.returncode == 0, done.stderr
    assert "Installing" not in done.stdout and len(done.stdout.split()) > 30


@pytest.mark.parametrize("block", [b for b in blocks("sh") if b.first.startswith(f"curl {ADDRESS}")], ids=str)
def test_curl_is_answered(block: Block, copy: Path, url: str) -> None:
    done = run(block.text.replace(ADDRESS, url).replace("curl ", "curl --fail "), copy, code=copy)
    answer = '"embedding"' if "/v1/embeddings" in block.text else '"text"'
    assert done.returncode == 0 and answer in done.stdout, done.stdout + done.stderr


# Run elsewhere: batches need --batch-dir (tests/endpoint/batches), docs/clients.md a name (tests/clients).
ELSEWHERE = ("docs/batches.md", "docs/clients.md")
OF_OPENAI = [b for b in blocks("python") if "import OpenAI" in b.text and b.document not in ELSEWHERE]


@pytest.mark.parametrize("block", OF_OPENAI, ids=str)
def test_openais_client_is_answered(block: Block, copy: Path, url: str) -> None:
    done = run([sys.executable, "-c", block.text.replace(ADDRESS, url)], copy, code=copy)
    assert done.returncode == 0 and len(done.stdout.split()) > 5, done.stdout + done.stderr


def test_the_copy_is_what_ran(copy: Path) -> None:
    """Not the checkout, which the environment's `orca` would import by itself."""
    done = run(
        [str(copy / ".venv/bin/python"), "-c", "import orca_jax; print(orca_jax.__file__)"], copy, code=copy
    )
    assert done.stdout.strip() == os.fspath(copy / "orca_jax/__init__.py")
