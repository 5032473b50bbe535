"""The source archive and the wheel: their contents and their metadata."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.metadata import Metadata
from trove_classifiers import classifiers

import orca_jax
from tests.places import ROOT

# Read from disk when the package runs, and so easily forgotten; Python files are found by their imports.
DATA_FILES = {
    "orca_jax/py.typed",
    "orca_jax/control/worker.proto",
    *(f"orca_jax/demo_model/{name}" for name in ("chat_template.jinja", "config.json", "model.safetensors")),
    "orca_jax/demo_model/tokenizer.json",
    *(f"orca_jax/native/{name}" for name in ("linear.c", "split_attention.c", "vectors.h", "xla_call.h")),
    "server/rpc/generation.proto",
}
# From the source archive everything can be done that a checkout allows.
TOP_LEVEL = {
    *(".ci", "bench", "deploy", "docs", "examples", "orca_jax", "scripts", "server", "tests"),
    *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md"),
    *("constraints.txt", "mkdocs.yml", "pyproject.toml"),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive, and with the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--quiet", "--outdir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile) -> Metadata:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Metadata.from_email(wheel.read(name), validate=True)


def test_the_wheel_has_both_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    sources = {
        path.relative_to(ROOT).as_posix()
        for room in ("orca_jax", "server")
        for path in (ROOT / room).rglob("*.py")
    }
    assert not (sources | DATA_FILES) - names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"orca_jax", "server", f"orca_jax-{orca_jax.__version__}.dist-info"}
    static = {path.relative_to(ROOT).as_posix() for path in (ROOT / "server/web/static").rglob("*.*")}
    assert not static - names


def test_the_source_archive_is_a_whole_checkout(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {name.split("/")[0] for name in names} - {"PKG-INFO", ".gitignore"} == TOP_LEVEL


def test_what_the_wheel_says_of_itself(wheel: zipfile.ZipFile) -> None:
    said = metadata(wheel)
    assert said.name == "orca_jax" and str(said.version) == orca_jax.__version__
    assert said.license_expression == "Apache-2.0" and said.description_content_type == "text/markdown"
    assert said.description == (ROOT / "README.md").read_text(encoding="utf-8")
    assert said.classifiers and not set(said.classifiers) - classifiers
    assert said.provides_extra and {"cuda", "otel", "ray"} <= set(said.provides_extra)
    (points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "orca = server.cli:main" in wheel.read(points).decode()


def test_changelog_and_citation_are_of_this_version() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = [line for line in changes.splitlines() if line.startswith("## ")]
    latest = next(line for line in headings if line != "## Unreleased")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert latest == f"## {orca_jax.__version__} - {citation['date-released']}"
    assert str(citation["version"]) == orca_jax.__version__
