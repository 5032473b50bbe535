"""Commands that install extras, in messages and in documents. Nothing is installed here."""

import re
import shlex
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from orca_jax import errors
from orca_jax.errors import install_line
from tests.install_lines import InstallLine, install_lines, sources
from tests.places import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
NAMES = {"orca_jax", "orca-jax"}


def installed_metadata(_: str) -> list[str]:
    """Let the package have a wheel's metadata, with its requirements."""
    listed = [f"{each}" for each in PROJECT["project"]["dependencies"]]
    for extra, requirements in EXTRAS.items():
        for each in map(Requirement, requirements):
            marker = f"({each.marker}) and " if each.marker else ""
            each.marker = None
            listed.append(f"{each}; {marker}extra == '{extra}'")
    return listed


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_line_has_what_the_extra_needs(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "requires", installed_metadata)
    pip, install, *requirements = shlex.split(install_line(extra))
    assert (pip, install) == ("pip", "install")
    assert {str(Requirement(each)) for each in requirements} == {
        str(Requirement(each)) for each in EXTRAS[extra]
    }


def test_without_metadata_it_is_from_the_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(errors, "requires", missing)
    assert install_line("ray") == "pip install -e '.[ray]' -c constraints.txt"


LINES = install_lines()


def test_documents_say_how_to_install() -> None:
    """Make sure that the list is not empty by mistake."""
    commands = {line.command for line in LINES}
    assert ".venv/bin/pip install -e '.[cuda]' -c constraints.txt" in commands
    assert len({line.file for line in LINES}) > 8


@pytest.mark.parametrize("line", LINES, ids=str)
def test_a_line_is_well_formed(line: InstallLine) -> None:
    """A line installs this package from files, since no index has it, with extras that exist."""
    *_, last = line.command.split(" && ")
    words = shlex.split(last)
    pip, install, *rest = words
    assert pip.endswith("/bin/pip") and install == "install"
    while rest:
        word = rest.pop(0)
        if word == "-c":
            assert (ROOT / rest.pop(0)).is_file()
        elif word == "-e" or "$(ls dist/*.whl)" in word:
            where, _, extra = (rest.pop(0) if word == "-e" else word).removesuffix("]").partition("[")
            assert where in (".", "$(ls dist/*.whl)") and set(extra.split(",")) <= set(EXTRAS)
        else:
            assert Requirement(word).name not in NAMES


def test_messages_take_their_line_from_one_place() -> None:
    said = [path.name for path in sources() if "pip install" in path.read_text(encoding="utf-8")]
    assert said == ["errors.py"]
    used = {
        extra
        for path in sources()
        for extra in re.findall(r"""install_line\(["']([\w-]+)["']\)""", path.read_text(encoding="utf-8"))
    }
    assert {"cuda", "ray", "otel", "kv-events"} <= used <= set(EXTRAS)
